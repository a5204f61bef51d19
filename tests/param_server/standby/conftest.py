"""Labs for servers whose nodes are cut off."""

from tests.lab import fixtures

lab_name, lab_problems = fixtures.lab_name, fixtures.lab_problems
