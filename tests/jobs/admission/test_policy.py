import pytest

from ringweave.errors import JobError
from ringweave.jobs import admission
from ringweave.jobs.admission import JOB_VERBS

RULES = """\
rules:
  - {users: ["*"], verbs: [jobs, status], jobs: all}
  - {users: [ann, bob], max_gpus: 16}
  - {users: [ann], verbs: [submit], max_gpus: 32}
  - {users: [root], jobs: all}
"""


@pytest.mark.parametrize(
    ("requester", "verb", "allowed", "any_owner", "max_gpus"),
    [
        ("eve", "status", True, True, None),
        ("eve", "submit", False, False, None),
        ("bob", "submit", True, False, 16),
        ("ann", "submit", True, False, 32),
        ("ann", "stop", True, False, 16),
        ("ann", "status", True, True, None),
        ("root", "delete", True, True, None),
    ],
)
def test_the_widest_rule_counts(requester, verb, allowed, any_owner, max_gpus) -> None:
    found = admission.parse_policy(RULES).find_permission(requester, verb)
    assert (found.allowed, found.any_owner, found.max_gpus) == (allowed, any_owner, max_gpus)


def test_without_a_file_everybody_may_everything_with_their_own_jobs() -> None:
    for verb in JOB_VERBS:
        found = admission.OPEN_POLICY.find_permission("eve", verb)
        assert (found.allowed, found.any_owner, found.max_gpus) == (True, False, None)


def test_a_file_on_disk(tmp_path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text(RULES)
    assert admission.load_policy(path) == admission.parse_policy(RULES)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "",
            r"policy file: 'nothing', expected a map with the key rules\. Begin with \"rules:\", then .*\[p:1\]",
        ),
        (
            "rules: [{user: [ann]}]",
            r"unknown key in rules\.0: 'user', expected one of .*Did you mean \"users\"\?",
        ),
        (
            "rules: [{users: [a], verbs: [stopp]}]",
            r"verb: 'stopp', expected one of submit, .*\"stop\"\? \[p:1: ",
        ),
        ("rules: [{users: [a], jobs: mine}]", r"jobs: 'mine', expected own or all\. Leave it out for own\. \[p:1"),
        (
            "rules: [{users: [a], max_gpus: -1}]",
            r"max_gpus: -1, expected a whole number of at least 0: GPUs of all jobs",
        ),
        ("rules: [{users: ann}]", r"users: 'ann', expected a list of user names, or \* for everybody\. Write"),
    ],
)
def test_wrong_files(text: str, told: str) -> None:
    with pytest.raises(JobError, match=told):
        admission.parse_policy(text, source="p")
