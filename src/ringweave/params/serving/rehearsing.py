"""Exchanges before the job begins, which count for nothing: what one needs of the server's processor."""

import threading
import time
from collections.abc import Callable

from ringweave.errors import TrainingError, explain
from ringweave.params.flat import Flat
from ringweave.params.messages import RehearsalOver, Rehearse, Rehearsed
from ringweave.params.serving import job as jobs
from ringweave.params.serving.model import GatheredModel
from ringweave.topology import cgroups
from ringweave.wire import Answer, Call, Done, Handler, Identity


class Rehearsal:
    """A model of zeros that pushes are applied to while anybody rehearses, and until there is a real one."""

    def __init__(self, check_term: Callable[[int], None]) -> None:
        """`check_term` refuses a message that is meant for a server of another term."""
        self._check_term = check_term
        self._lock = threading.Lock()
        self._model: GatheredModel | None = None
        self._peers: set[Identity] = set()
        self._is_over = False

    def handlers(self) -> list[Handler]:
        """What the wire's server has to know."""
        return [Handler(message=Rehearse, handle=self._rehearse), Handler(message=RehearsalOver, handle=self._leave)]

    def end(self) -> None:
        """The job begins: its memory is the job's."""
        with self._lock:
            self._model, self._is_over = None, True

    def _leave(self, call: Call) -> Done:
        message: RehearsalOver = call.message
        self._check_term(message.term)
        with self._lock:
            self._peers.discard(call.peer)
            if not self._peers:
                self._model = None
        return Done()

    def _rehearse(self, call: Call) -> Answer:
        """As a push and the pull that follows it, in a job in which each ring has an equal part of a train step."""
        message: Rehearse = call.message
        setup = message.setup
        jobs.check_buffers(setup, [len(buffer) for buffer in call.buffers])
        if not setup.rings:
            raise TrainingError(explain("rings of a rehearsal", got="none", expected="those of the job", do="Say them"))
        self._check_term(message.term)
        parameters = Flat(setup.tensors)
        with self._lock:
            if self._is_over:
                got, do = "a job that has begun", "Rehearse before it begins"
                raise TrainingError(explain("rehearsal", got=got, expected="none yet", do=do))
            self._peers.add(call.peer)
            model = self._model
            if model is None or model.setup != setup:
                self._model = None  # before there are two
                initial = Flat(setup.tensors)
                for piece in initial.pieces:
                    piece.zero_()
                self._model = model = GatheredModel(setup, initial)
            share, options = 1 / len(setup.rings), [group.options for group in setup.groups]
            model.apply_gradient(Flat.over(setup.tensors, call.buffers), share, options)
            model.read(parameters)
        said = Rehearsed(processor_s=time.process_time(), cores=cgroups.cores_of_one(1))
        return Answer(said, parameters.buffers())
