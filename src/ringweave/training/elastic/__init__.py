"""Training whose workers come and go: no train step is lost when one dies in its midst."""
