"""Programs: what each rank does, step by step, so that a message goes through a schedule in segments."""

from ringweave.schedules.programs.compiling import compile_program
from ringweave.schedules.programs.program import IN_PLACE, Do, Instruction, Pipelining, Program

__all__ = ["IN_PLACE", "Do", "Instruction", "Pipelining", "Program", "compile_program"]
