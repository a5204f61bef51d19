"""Rules in CEL that refuse illegal requests in the API server itself, before anything is stored.

The split without sorting: a total N is feasible on capacities c with at least m on each used node iff N >= m and the
K = N div m largest usable capacities sum to at least N: more than K nodes would get less than m each. The sum of the K
largest of c is the smallest of K t + sum(max(c - t, 0)) over t among c and 0, so N has to be at most each of these.

What an elastic job may lose, without sorting: the split takes the largest nodes that hold N, and fills them in node
order with m for each still to come. So with T the smallest capacity that is taken, X the room that is left over (less
than T), and c the capacity of the last node taken, in node order, the smallest node gets max(m, min(T, c - X)).
"""

from typing import Any

from ringweave.jobs.requests.request import MAX_WORKERS, RESERVED, SERVED
from ringweave.launch.kubernetes.resource.fields import FIXED

Rule = dict[str, Any]

_TOTAL = "(has(self.gpus) ? self.gpus : has(self.cpuWorkers) ? self.cpuWorkers : 0)"
_USABLE = "self.nodes.filter(n, n.capacity >= self.minPerNode)"
_ROOM = f"{_USABLE}.map(n, n.capacity).sum()"
_ROOM_OF_LARGEST = (
    # An n that is not usable is smaller than t and adds nothing; a filter for them would cost as much again.
    f"self.nodes.all(t, t.capacity < self.minPerNode || {_TOTAL} <= ({_TOTAL} / self.minPerNode) * t.capacity + "
    "self.nodes.map(n, n.capacity > t.capacity ? n.capacity - t.capacity : 0).sum())"
)
OPTIONAL = (
    *("gpus", "cpuWorkers", "source", "directory", "data", "image", "claim", "elastic"),
    *("ttlSecondsAfterFinished", "managedBy"),
)


def of_spec() -> list[Rule]:
    """Rules of the whole spec, in the order in which people should read them."""
    return [
        _rule("has(self.gpus) != has(self.cpuWorkers)", "write either gpus or cpuWorkers, not both and not neither"),
        _rule(
            f"{_TOTAL} >= self.minPerNode",
            "the total is less than one used node gets at least: ask for more, or lower minPerNode",
            reads="'a total of %d is less than the %d that a used node gets at least: ask for %d or more, or lower "
            f"minPerNode'.format([{_TOTAL}, self.minPerNode, self.minPerNode])",
        ),
        _rule(
            f"{_TOTAL} <= {_ROOM}",
            "the nodes have not enough room in all: ask for less, add a node or raise a capacity",
            reads="'a total of %d is more than the %d that the nodes with room for at least %d can run: ask for less, "
            f"add a node or raise a capacity'.format([{_TOTAL}, {_ROOM}, self.minPerNode])",
        ),
        _rule(
            # Where all usable nodes may take part their room in all is what counts, and that is the rule before.
            f"{_TOTAL} < self.minPerNode || {_TOTAL} / self.minPerNode >= {_USABLE}.size() || {_ROOM_OF_LARGEST}",
            "no split gives every used node minPerNode: as many nodes as are needed would get too few each; "
            "ringweave split names the nearest totals that can be",
        ),
        *_of_elastic(),
        _rule(
            "!(has(self.source) && has(self.directory))",
            "source and directory exclude each other: with a directory the image has the script",
        ),
        _rule(
            " && ".join(f"has(self.{name}) == has(oldSelf.{name})" for name in OPTIONAL),
            "a field that was absent stays absent, one that was there stays: delete the job and submit it anew",
        ),
        _rule("self.stopRun >= oldSelf.stopRun && self.retryRun >= oldSelf.retryRun", "stopRun and retryRun only grow"),
        _rule("!has(oldSelf.requester) || has(self.requester)", "the requester stays"),
    ]


def _of_elastic() -> list[Rule]:
    served = " || ".join(f"self.mode == '{mode}'" for mode in SERVED)
    most = _most_of_elastic()
    return [
        _rule(
            f"!has(self.elastic) || !({served})",
            "elastic excludes a parameter server, which dies with its node: leave elastic out, or write mode balanced",
        ),
        _rule(
            f"!has(self.elastic) || self.nodes.all(n, n.capacity < self.minPerNode || n.capacity < {_TOTAL})",
            "an elastic job needs two nodes or more, as one can be lost, and here one node gets all: leave elastic "
            "out, or lower its capacity",
        ),
        _rule(
            f"!has(self.elastic) || {_TOTAL} < 1 || {_USABLE}.size() == 0 || self.elastic.min <= {most}",
            "elastic.min is more than is left without the smallest node that the split uses",
            reads="'elastic.min of %d is more than the %d that are left without the smallest node that the split uses: "
            f"write %d, or less to survive the loss of larger nodes'.format([self.elastic.min, {most}, {most}])",
        ),
    ]


def _most_of_elastic() -> str:
    """The total without the smallest node's part; a number beyond all totals where there is no such split.

    `[x].map(name, ...)[0]` stands for a name that a value gets: CEL has no other word for it that all API servers know.
    """
    larger = "self.nodes.map(n, n.capacity > {0} ? n.capacity : 0).sum()"
    smallest_taken = (
        f"self.nodes.filter(t, t.capacity >= self.minPerNode && {larger.format('t.capacity')} < {_TOTAL})"
        ".map(t, t.capacity).min()"
    )
    large, alike = "self.nodes.filter(n, n.capacity > least)", "self.nodes.filter(n, n.capacity == least)"
    # Of those that are alike the first are taken. Not by indexOf: it costs as much as the longest text there may be.
    taken = "self.nodes.filter(n, n.capacity > least || n.name == mark)"
    last = f"[{alike}[count - 1].name].map(mark, {taken}[{taken}.size() - 1].capacity)[0]"
    is_none = (
        f"{alike}.size() < count || ({large}.size() + count) * self.minPerNode > {_TOTAL}"
        f" || {large}.size() + count == 1"
    )
    left_over = f"(above + count * least - {_TOTAL})"
    smallest = f"[self.minPerNode, [least, {last} - {left_over}].min()].max()"
    value = f"{is_none} ? {MAX_WORKERS} : {_TOTAL} - {smallest}"
    counted = f"[({_TOTAL} - above + least - 1) / least].map(count, {value})[0]"
    return f"[{smallest_taken}].map(least, [{larger.format('least')}].map(above, {counted})[0])[0]"


def of_field(name: str) -> list[Rule]:
    """Rules of one field of the spec."""
    found = []
    if name in FIXED:
        found.append(_rule("self == oldSelf", f"{name} cannot change: delete the job and submit it anew"))
    if name == "environment":
        reserved = f"!self.exists(v, v.name.startsWith('{RESERVED}'))"
        found.append(_rule(reserved, f"a variable begins with {RESERVED}: those are set by the launcher"))
    return found


def _rule(rule: str, message: str, *, reads: str | None = None) -> Rule:
    """A rule, its message, and where it helps an expression for a message with the numbers in it.

    Numbers go into it by `format`: the API server estimates the text of `string(number)` as unbounded, so that a `+`
    with it costs more than the whole definition may.
    """
    return {"rule": rule, "message": message, **({"messageExpression": reads} if reads else {})}
