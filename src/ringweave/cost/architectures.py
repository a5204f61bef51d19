"""What a round of four training architectures takes by the formulas of the paper, and of a fifth that corrects one.

They belong to a network without structure (one rate, one latency for all), unlike the rest of this room, which costs
schedules on the links of a cluster. A round's time is linear in the latency: `line` gives both coefficients, from which
the crossovers follow exactly.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ringweave.errors import UsageError, explain
from ringweave.files import problems


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """The inputs of the formulas. Times that follow from them are predicted."""

    num_workers: int
    """N."""
    num_groups: int
    """k: rings of workers. Only the architectures of `GROUPED` look at it."""
    num_bytes: float
    """S: gradients, and parameters, of one worker."""
    latency_s: float
    """a: in the paper also the wait that slow workers cause, so that it may be far larger than a network's."""
    bandwidth_bytes_per_s: float
    """B: of every worker and of the server, in each direction."""
    reduce_s_per_byte: float
    """C: time to add a byte of a gradient."""

    def __post_init__(self) -> None:
        """Refuse what the formulas do not mean."""
        _check("workers", self.num_workers, "at least one", is_allowed=self.num_workers >= 1)
        allowed = f"from 1 to the number of workers, {self.num_workers}"
        _check("groups", self.num_groups, allowed, is_allowed=1 <= self.num_groups <= self.num_workers)
        _check("rate", self.bandwidth_bytes_per_s, "a positive rate", is_allowed=self.bandwidth_bytes_per_s > 0)
        for what, value in (
            ("bytes", self.num_bytes),
            ("latency", self.latency_s),
            ("time to reduce a byte", self.reduce_s_per_byte),
        ):
            _check(what, value, "zero or more", is_allowed=value >= 0)

    @property
    def ring_size(self) -> float:
        """N/k, as in the formulas; a fraction where k does not divide N."""
        return self.num_workers / self.num_groups

    @property
    def largest_ring(self) -> int:
        """Workers of the last ring: N/k rounded down, and the remainder."""
        return self.num_workers // self.num_groups + self.num_workers % self.num_groups


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """A time as a function of the latency: `latencies` a + `rest_s`."""

    latencies: float
    """Messages that are waited for one after the other."""
    rest_s: float
    """What does not depend on the latency."""

    def at(self, latency_s: float) -> float:
        """Seconds at a latency."""
        return self.latencies * latency_s + self.rest_s


def seconds(architecture: str, setting: Setting) -> float:
    """The predicted time of one round.

    Where k does not divide N the formula is taken as it is, with the fraction N/k.

    Raises:
        UsageError: No such architecture.
    """
    return line(architecture, setting).at(setting.latency_s)


def seconds_of_largest_ring(architecture: str, setting: Setting) -> float:
    """The predicted time of a round where the ring with the remainder has to be waited for.

    It is that of `seconds` where k divides N, and for an architecture without groups.

    Raises:
        UsageError: No such architecture.
    """
    return _line(architecture, setting, setting.largest_ring).at(setting.latency_s)


def line(architecture: str, setting: Setting) -> Line:
    """The predicted time as a function of the latency; that of the setting is not looked at.

    Raises:
        UsageError: No such architecture.

    Source:
        Huang and Yang, "A highly scalable distributed machine learning architecture based on Ring All-Reduce" (2022);
        `ps-hra-shared-link` is our own.
    """
    return _line(architecture, setting, setting.ring_size)


def check_name(architecture: str) -> str:
    """The name, if it is one.

    Raises:
        UsageError: It is none.
    """
    if architecture not in NAMES:
        do = problems.closest(architecture, NAMES) or "Use one of these names"
        expected = f"one of {', '.join(NAMES)}"
        raise UsageError(explain("architecture", got=architecture, expected=expected, do=do))
    return architecture


def _check(what: str, got: float, allowed: str, *, is_allowed: bool) -> None:
    if not is_allowed:
        raise UsageError(explain(what, got=got, expected=allowed, do="Change it"))


def _line(architecture: str, setting: Setting, ring_size: float) -> Line:
    return _FORMULAS[check_name(architecture)](setting, ring_size)


def _ps(setting: Setting, _: float) -> Line:
    """2(a + N S/B) + N S C: the server's link, and its processor, serve all workers."""
    return _exchange(setting, setting.num_workers)


def _ring(setting: Setting, _: float) -> Line:
    """2(N-1)(a + S/(N B)) + (N-1)(S/N) C."""
    return _ring_of(setting, setting.num_workers)


def _hierarchical(setting: Setting, ring_size: float) -> Line:
    """A ring in each group, a ring of the k representatives, a broadcast in each group."""
    return _sum(_ring_of(setting, ring_size), _ring_of(setting, setting.num_groups), _message(setting))


def _ps_hra(setting: Setting, ring_size: float) -> Line:
    """A ring in each group, an exchange with the server as if no other group had one, a broadcast in each group."""
    return _sum(_ring_of(setting, ring_size), _exchange(setting, 1), _message(setting))


def _ps_hra_shared_link(setting: Setting, ring_size: float) -> Line:
    """The same where the k representatives come to the server together and share it, as the workers of PS do."""
    return _sum(_ring_of(setting, ring_size), _exchange(setting, setting.num_groups), _message(setting))


def _ring_of(setting: Setting, num_members: float) -> Line:
    """A ring allreduce: scatter-reduce, then allgather."""
    steps = num_members - 1
    chunk_bytes = setting.num_bytes / num_members
    moved_s = 2 * steps * chunk_bytes / setting.bandwidth_bytes_per_s
    return Line(latencies=2 * steps, rest_s=moved_s + steps * chunk_bytes * setting.reduce_s_per_byte)


def _exchange(setting: Setting, num_peers: int) -> Line:
    """All peers at once send S to the server, which adds it, and get S back."""
    served_bytes = num_peers * setting.num_bytes
    moved_s = 2 * served_bytes / setting.bandwidth_bytes_per_s
    return Line(latencies=2, rest_s=moved_s + served_bytes * setting.reduce_s_per_byte)


def _message(setting: Setting) -> Line:
    return Line(latencies=1, rest_s=setting.num_bytes / setting.bandwidth_bytes_per_s)


def _sum(*lines: Line) -> Line:
    return Line(latencies=sum(each.latencies for each in lines), rest_s=sum(each.rest_s for each in lines))


_FORMULAS = MappingProxyType(
    {
        "ps": _ps,
        "ring": _ring,
        "hierarchical": _hierarchical,
        "ps-hra": _ps_hra,
        "ps-hra-shared-link": _ps_hra_shared_link,
    }
)
NAMES: tuple[str, ...] = tuple(_FORMULAS)
PAPER: tuple[str, ...] = ("ps", "ring", "hierarchical", "ps-hra")
"""The four that the paper compares."""
CORRECTED: tuple[str, ...] = ("ps", "ring", "hierarchical", "ps-hra-shared-link")
"""The same with the server's link shared; PS has it shared in the paper already."""
GROUPED: frozenset[str] = frozenset({"hierarchical", "ps-hra", "ps-hra-shared-link"})
"""Those that look at the number of groups."""
LABELS: Mapping[str, str] = MappingProxyType(
    {
        "ps": "PS",
        "ring": "ring",
        "hierarchical": "hierarchical",
        "ps-hra": "PS-HRA",
        "ps-hra-shared-link": "PS-HRA, server's link shared",
    }
)
