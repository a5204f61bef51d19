"""What the tests of verbs share."""

from tests.lab import fixtures

cli, lab_name, lab_problems = fixtures.cli, fixtures.lab_name, fixtures.lab_problems
