"""One pomona replica against `mlx_lm.server`: same machine, same model, same thread settings, same load, taking turns.

    make bench                                      # or with some loads only:
    python tests/bench/against_mlx_lm_server.py --loads long_prompt joining --rounds 2

Each round starts a server, warms it, measures one load and ends it, then the other server; who begins alternates, since
machines drift. The table has the medians over the rounds, their ratio, the lowest and highest ratio of a round, and the
bar. Progress is on stderr.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import models
from client import LoadFailed
from loads import LOADS, QUICK, Bar, Figures, Sizes, run
from servers import NAMES, serving

# (load, server) -> the figures of each round; none where it failed.
Seen = dict[tuple[str, str], list[Figures]]


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def measure(args: argparse.Namespace, folder: Path) -> tuple[Seen, int]:
    """All rounds of all loads, and how many of them failed."""
    names = [args.only] if args.only else list(NAMES)
    seen: Seen = {(load, name): [] for load in args.loads for name in names}
    failed = 0
    for load in args.loads:
        model = models.build(LOADS[load].model, folder)
        for round_ in range(args.rounds):
            for name in names if round_ % 2 == 0 else reversed(names):
                begin = time.monotonic()
                try:
                    figures = one(load, name, model, args)
                except LoadFailed as exc:
                    failed += 1
                    seen[load, name].append({})
                    say(f"{load}, round {round_ + 1}, {name}: FAILED: {exc}")
                    continue
                seen[load, name].append(figures)
                shown = ", ".join(f"{measure} {value:.4g}" for measure, value in figures.items())
                say(f"{load}, round {round_ + 1}, {name} ({time.monotonic() - begin:.0f} s): {shown}")
    return seen, failed


def one(load: str, name: str, model: Path, args: argparse.Namespace) -> Figures:
    """One load on one server that is started for it."""
    given = args.pomona_options if name == "pomona" else args.mlx_lm_options
    options = [*LOADS[load].options.get(name, ()), *shlex.split(given)]
    with serving(name, model, options) as target:
        return asyncio.run(run(LOADS[load], target, QUICK if args.quick else Sizes(), limit_s=args.limit_s))


def table(seen: Seen, loads: list[str]) -> str:
    """Markdown: a row a measure."""
    lines = ["| load | measure | pomona | mlx_lm.server | ratio | of the rounds | bar | met |", "|" + "---|" * 8]
    for load in loads:
        ours, theirs = (seen.get((load, name), []) for name in NAMES)
        bars = LOADS[load].bars
        for measure in dict.fromkeys(measure for figures in (*ours, *theirs, bars) for measure in figures):
            row = _row([f.get(measure) for f in ours], [f.get(measure) for f in theirs], bars.get(measure))
            lines.append(f"| {load} | {measure} | {' | '.join(row)} |")
    return "\n".join(lines)


def _row(ours: Sequence[float | None], theirs: Sequence[float | None], bar: Bar | None) -> list[str]:
    """Both medians, their ratio, the ratios' range, the bar and whether it is met."""
    medians = [
        statistics.median(known) if (known := [v for v in values if v is not None]) else None
        for values in (ours, theirs)
    ]
    shown = ["" if median is None else f"{median:.4g}" for median in medians]
    rounds = [a / b for a, b in zip(ours, theirs, strict=False) if a is not None and b]
    if medians[0] is None or not medians[1] or not rounds:
        return [*shown, "", "", str(bar or ""), "not measured" if bar else ""]
    ratio = medians[0] / medians[1]
    met = "" if bar is None else "yes" if bar.met(ratio) else "NO"
    return [*shown, f"{ratio:.3f}", f"{min(rounds):.3f} to {max(rounds):.3f}", str(bar or ""), met]


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loads", nargs="+", choices=list(LOADS), default=list(LOADS), metavar="LOAD")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", choices=NAMES, help="measure one server alone")
    parser.add_argument("--json", type=Path, help="write every round's figures here")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that everything runs")
    parser.add_argument("--pomona-options", default="", help="more flags for pomona serve, in one string")
    parser.add_argument("--mlx-lm-options", default="", help="more flags for mlx_lm.server, in one string")
    parser.add_argument("--limit-s", type=float, default=420, help="give a load up after so long")
    parser.epilog = "loads: " + "; ".join(f"{name}: {load.run.__doc__}" for name, load in LOADS.items())
    return parser.parse_args()


def main() -> None:
    args = parsed()
    with tempfile.TemporaryDirectory(prefix="pomona-bench-") as folder:
        seen, failed = measure(args, Path(folder))
    print(table(seen, args.loads))
    if args.json:
        raw = [{"load": load, "server": name, "rounds": rounds} for (load, name), rounds in seen.items()]
        args.json.write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
    if failed:
        sys.exit(f"{failed} rounds failed: see above")


if __name__ == "__main__":
    main()
