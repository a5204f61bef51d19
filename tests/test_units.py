import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ringweave import units
from ringweave.errors import UsageError


@pytest.mark.parametrize(
    ("text", "bytes_per_s"),
    [
        ("200Mbit/s", 25e6),
        ("1Gbit/s", 125e6),
        ("8bit/s", 1.0),
        ("2.5kbit/s", 312.5),
        ("1e2 Tbit/s", 12.5e12),
        (" 40Gbit/s ", 5e9),
    ],
)
def test_a_rate_is_bits_in_and_bytes_out(text, bytes_per_s):
    assert units.parse_rate(text) == bytes_per_s


@pytest.mark.parametrize(
    "text",
    [
        "",
        "200",
        "fast",
        "200MB",
        "200MB/s",
        "200mbit/s",
        "-5Mbit/s",
        "0bit/s",
        "0e5Gbit/s",
        "nanMbit/s",
        "infbit/s",
        "1e999Mbit/s",
        "1e9999bit/s",
        "1e-400bit/s",
        "1,5Gbit/s",
        "200Mbit/s each",
        "--bit/s",
        "0x10bit/s",
    ],
)
def test_a_bad_rate_is_named_with_the_units_and_an_example(text):
    with pytest.raises(UsageError, match=r"^rate: ") as caught:
        units.parse_rate(text)
    assert repr(text) in str(caught.value)
    assert "one of bit/s, kbit/s, Mbit/s, Gbit/s, Tbit/s. Write it like 200Mbit/s." in str(caught.value)


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("25MB", 25000000),
        ("25MiB", 26214400),
        ("0", 0),
        (17, 17),
        ("1.5kB", 1500),
        ("4 KiB", 4096),
        ("25e6", 25000000),
        ("9223372036854775807", 2**63 - 1),
        ("0.5KiB", 512),
    ],
)
def test_a_size_is_bytes_unless_it_has_a_unit(text, num_bytes):
    assert units.parse_bytes(text) == num_bytes


@pytest.mark.parametrize(
    "text", ["", "25mb", "25Mbit/s", "-1", -1, "0.5", "1.0001kB", "1e999", "nan", "9223372036854775808"]
)
def test_a_bad_size_is_named_with_the_units_and_an_example(text):
    with pytest.raises(UsageError, match=r"^size: .*one of B, kB, MB, .*TiB\. Write it like 25MB\.$"):
        units.parse_bytes(text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("50us", 50e-6), ("50µs", 50e-6), ("3ns", 3e-9), ("2ms", 2e-3), ("1.5s", 1.5), (7, 7.0), ("0", 0.0)],
)
def test_a_time_is_seconds_unless_it_has_a_unit(text, seconds):
    assert units.parse_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "soon", "-1s", "5 minutes", "1e400s", "inf", "nan", "1e999s"])
def test_a_bad_time_is_named_with_the_units_and_an_example(text):
    with pytest.raises(UsageError, match=r"^time: .*one of s, ms, us, µs, ns\. Write it like 50us\.$"):
        units.parse_seconds(text)


@given(st.floats(min_value=1e-300, max_value=1e300))
@example(25e6)
def test_a_formatted_rate_is_exact(bytes_per_s):
    assert units.parse_rate(units.format_rate(bytes_per_s)) == bytes_per_s


@given(st.integers(min_value=0, max_value=2**63 - 1))
@example(2**63 - 1)
def test_a_formatted_size_is_exact(num_bytes):
    assert units.parse_bytes(units.format_bytes(num_bytes)) == num_bytes


@given(st.floats(min_value=0.0, max_value=1e300))
def test_a_formatted_time_is_exact(seconds):
    assert units.parse_seconds(units.format_seconds(seconds)) == seconds


@given(st.text())
def test_any_text_is_a_number_or_a_usage_error(text):
    for parse in (units.parse_rate, units.parse_bytes, units.parse_seconds):
        try:
            value = parse(text)
        except UsageError:
            continue
        assert 0 <= value < math.inf


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (units.format_rate(25e6), "200Mbit/s"),
        (units.format_rate(12.5e9), "100Gbit/s"),
        (units.format_rate(0.125), "1bit/s"),
        (units.format_bytes(25_000_000), "25MB"),
        (units.format_bytes(0), "0B"),
        (units.format_seconds(50e-6), "50us"),
        (units.format_seconds(0.0), "0s"),
    ],
)
def test_numbers_are_written_as_people_write_them(text, expected):
    assert text == expected


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-1, "0 s"), (0, "0 s"), (119.9, "119 s"), (120, "2 min"), (7199, "119 min"), (7200, "2 h"), (172800, "2 days")],
)
def test_spans(seconds: float, text: str) -> None:
    assert units.show_duration(seconds) == text


@pytest.mark.parametrize(("text", "fraction"), [("0.5%", 0.005), ("100%", 1.0), ("1.25%", 0.0125)])
def test_a_percentage_is_a_fraction(text: str, fraction: float) -> None:
    assert units.parse_percent(text, "loss") == fraction


@pytest.mark.parametrize("text", ["", "0.5", "0%", "0.0%", "100.1%", "-1%", "5 %", "%", "1e1%", "half", 0.5, None])
def test_other_texts_are_no_percentage(text: str) -> None:
    told = r"^loss: .*, expected a number above 0 and up to 100 with a percent sign. Write it like 0.5%. \[x\]$"
    with pytest.raises(UsageError, match=told):
        units.parse_percent(text, "loss", where="x")
