from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test
from tests.jobs.life.test_random_lives import Lives
run_state_machine_as_test(Lives, settings=settings(max_examples=6000, stateful_step_count=60, deadline=None, database=None))
print("ok")
