"""Partition: the consecutive blocks of a model that each device of a pipeline gets."""
