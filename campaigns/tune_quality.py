"""Compares what the search of `fastlstm tune` chooses with the best of 48 settings.

usage: python campaigns/tune_quality.py RESULTS.jsonl DATA rates [--budget 10]
       python campaigns/tune_quality.py RESULTS.jsonl DATA PART [--budget 10] [--share 0/2]
DATA is a text, or a table (.csv, .parquet) whose 96 next steps are forecast. PART is search, grid,
seeds or report, in this order; `--set NAME=VALUE ...` are further options of a forecaster.
`rates` finds the default of a budget and times a step of every setting, in seconds of the process,
not of the clock. All else trains by steps, as many as the setting reaches in so many seconds at
that rate, so that the results do not depend on what else the machine does. One thread, fp32. Every
run is one line; a run that is there is not repeated. `search` gets 15 % of the time of the 48 runs
of the budget.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from tune_campaign import Campaign
from tune_tables import TableCampaign
from tune_texts import TextCampaign


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("results", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("part", choices=("rates", "search", "grid", "seeds", "report"))
    parser.add_argument("--budget", type=float, default=10.0)
    parser.add_argument("--most", type=int, default=1000, help="end after so many new runs")
    parser.add_argument("--share", default="0/1", help="0/2, 1/2: half of the runs of grid, seeds")
    parser.add_argument("--set", nargs="*", default=[])
    options = parser.parse_args()
    torch.set_num_threads(1)
    campaign: Campaign
    if options.data.suffix in (".csv", ".parquet"):
        more = dict(pair.split("=", 1) for pair in options.set)
        campaign = TableCampaign(options.results, options.data, options.budget, options.most)
        campaign.fields |= {name: read(text) for name, text in more.items()}
    else:
        campaign = TextCampaign(options.results, options.data, options.budget, options.most)
    first, every = map(int, options.share.split("/"))
    campaign.share = slice(first, None, every)
    getattr(campaign, options.part)()


def read(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return text


if __name__ == "__main__":
    main()
