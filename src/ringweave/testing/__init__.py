"""Test helpers for users: process groups of real ranks, and hypothesis strategies for clusters."""
