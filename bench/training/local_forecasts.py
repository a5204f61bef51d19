"""Forecasts of mode `local` beside measurements, in a lab of two sites of two: samples per second by H and bits.

    python bench/training/local_forecasts.py --out FILE     # needs root; goes on where FILE ends

A case is a number of inner steps and a format of outer gradients. Its forecast is the one of `auto`: from inner and
outer steps that the ranks run for some seconds before training. Then an epoch warms up, and the next one is measured.
Each sample is a pause beside its computing, since the ranks share the processors of one machine.
FILE gets a line of JSON for each case. Exit code 1 if fewer than nine of ten forecasts are within 5 %.
"""

import argparse
import dataclasses
import itertools
import json
import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import local_in_lab as lab_bench
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

import ringweave
from ringweave.comm import group_info
from ringweave.environment import WorkerEnvironment
from ringweave.planning import sites
from ringweave.planning.mode_forecast import ModeForecast
from ringweave.training import Local
from ringweave.training.collectives import ControlGroup
from ringweave.training.data import order
from ringweave.training.mode_choice import forecast, step_benchmark
from ringweave.training.outer_steps import SiteExchange
from ringweave_bench.lab_workers import lab_of, run_workers, two_sites

EPOCH_S, MIN_STEPS = 5.0, 8
ERROR, WITHIN = 0.05, 0.9
RUN_TIMEOUT_S = 1500


def main() -> None:
    """Under a launcher a worker; else run the cases that FILE lacks in a lab, and print all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inner-steps", type=int, nargs="+", default=[1, 4, 16, 64, 128, 256], help="of an outer step")
    parser.add_argument("--formats", nargs="+", default=["exact", "bf16", "int8", "int4", "int2"], help="bits")
    parser.add_argument("--batch", type=int, default=32, help="sequences of a train step, over all ranks")
    parser.add_argument("--layers", type=int, default=1, help="blocks of the model")
    parser.add_argument("--width", type=int, default=128, help="width of the model")
    parser.add_argument("--sample-ms", type=float, default=10.0, help="pause for each sample of a rank")
    parser.add_argument("--out", type=Path, default=Path("runs/local-forecasts.jsonl"), help="file for the cases")
    options = parser.parse_args()
    if "RANK" in os.environ:
        work(options)
    else:
        sys.exit(report(run_in_lab(options)))


def run_in_lab(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run the cases that the file lacks; return all in it.

    Raises:
        SystemExit: The run failed; its output is shown.
    """
    out = options.out.absolute()
    out.parent.mkdir(parents=True, exist_ok=True)
    out.touch()
    if missing_cases(options):
        names = ("batch", "layers", "width", "sample_ms")
        own = [f"--{name.replace('_', '-')}={getattr(options, name)}" for name in names] + [f"--out={out}"]
        own += ["--inner-steps", *map(str, options.inner_steps), "--formats", *options.formats]
        with lab_of(two_sites(2), "local-forecasts") as place:
            run_dir = out.with_suffix(".run")
            run_workers(place, __file__, own, run_dir, timeout_s=RUN_TIMEOUT_S, options=["--mode", "local"])
    return read_cases(out)


def read_cases(out: Path) -> list[dict[str, Any]]:
    """Return the cases in the file."""
    return [json.loads(line) for line in out.read_text().splitlines()]


def missing_cases(options: argparse.Namespace) -> list[tuple[int, str]]:
    """Return (inner steps, format) of the cases that the file lacks."""
    done = {(case["inner_steps"], case["format"]) for case in read_cases(options.out)}
    return [case for case in itertools.product(options.inner_steps, options.formats) if case not in done]


def work(options: argparse.Namespace) -> None:
    """Run the cases on one rank; rank 0 writes them."""
    torch.set_num_threads(1)
    dist.init_process_group("ringweave")
    control, (train, _) = ControlGroup(), lab_bench.corpus()
    (missing,) = (each["cases"] for each in control.gather_json({"cases": missing_cases(options)})[:1])
    for inner_steps, name in missing:
        found = run_case(options, control, train, Local(inner_steps=inner_steps, wire=name))
        if dist.get_rank() == 0:
            with options.out.open("a") as file:
                file.write(json.dumps({"inner_steps": inner_steps, "format": name, **found}) + "\n")
    dist.destroy_process_group()


def run_case(options: argparse.Namespace, control: ControlGroup, train: TensorDataset, local: Local) -> dict[str, Any]:
    """Return the predicted and the measured samples per second."""
    model, optimizer = lab_bench.make(options)
    reports, forecast_s = forecast_case((model, optimizer, DataLoader(train, batch_size=options.batch)), control, local)
    steps = local.inner_steps or 1
    num_steps = steps * max(-(-MIN_STEPS // steps), round(EPOCH_S / forecast_s(math.inf).step_s / steps))
    num_samples = options.batch * num_steps
    loader = DataLoader(TensorDataset(*(each[:num_samples] for each in train.tensors)), batch_size=options.batch)
    prepared = ringweave.prepare(model, optimizer, loader, mode="local", local=local)
    train_epoch(prepared)
    control.gather_json({})
    began_s = time.perf_counter()
    train_epoch(prepared)
    control.gather_json({})
    measured = num_samples / (time.perf_counter() - began_s)
    predicted = forecast_s(num_samples)
    return {
        "predicted": options.batch / predicted.step_s,
        "measured": measured,
        "train_steps": num_steps,
        "inner_step_s": [each["inner_step_s"] for each in reports],
        **{name: reports[0][name] for name in ("outer_exchange_s", "round_s", "round_steps")},
        "load": os.getloadavg()[0],
    }


def forecast_case(
    triple: Any, control: ControlGroup, local: Local
) -> tuple[list[dict[str, Any]], Callable[[float], ModeForecast]]:
    """Return the ranks' reports as `auto` gets them, and the forecast by samples of an epoch."""
    environment = WorkerEnvironment.from_environ(os.environ)
    model, _, loader = triple
    spec = order.read_loader(loader)
    own = forecast.describe_own_rank(model, loader, spec, environment, is_needed=True)
    own |= {"cap": None, "node": group_info.locate_process(environment, os.environ).node}
    reports = control.gather_json({**dataclasses.asdict(spec), **own})
    all_sites = sites.sites_of(None, reports)
    exchange = SiteExchange(all_sites, control.rank)
    reports = step_benchmark.benchmark_sites(reports, triple, control, exchange, local)
    exchange.close()

    def forecast_s(num_samples: float) -> ModeForecast:
        known = [{**each, "num_samples": num_samples} for each in reports]
        return forecast.forecast_sites(known, all_sites, local, sites.MAX_INNER_STEPS)

    return reports, forecast_s


def train_epoch(prepared: Any) -> None:
    """Train one epoch."""
    model, optimizer, loader = prepared
    for inputs, targets in loader:
        lab_bench.step(model, optimizer, inputs, targets)


def report(cases: list[dict[str, Any]]) -> int:
    """Print all cases; return the exit code."""
    errors = [case["predicted"] / case["measured"] - 1 for case in cases]
    for case, error in zip(cases, errors, strict=True):
        rates = f"predicted {case['predicted']:.1f} samples/s, measured {case['measured']:.1f}"
        print(f"{case['inner_steps']} inner steps, {case['format']}: {rates}, {error:+.1%}, load {case['load']:.0f}")
    num_within = sum(abs(error) <= ERROR for error in errors)
    print(f"{num_within} of {len(cases)} within {ERROR:.0%}")
    return int(num_within < WITHIN * len(cases))


if __name__ == "__main__":
    main()
