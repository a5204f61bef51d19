"""Times as the API server writes them (RFC 3339) and as `jobs` counts them (seconds since 1970)."""

from datetime import UTC, datetime


def parse(text: str) -> float:
    """Seconds since 1970 of `2026-11-21T13:00:00Z`, with or without a fraction."""
    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()


def show(seconds: float) -> str:
    """`2026-11-21T13:00:00Z`: what the fields of the API take; the fraction is cut off."""
    return datetime.fromtimestamp(int(seconds), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def show_micro(seconds: float) -> str:
    """With six digits of the second, for Leases."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
