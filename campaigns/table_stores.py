"""Tables in a real S3 server, beside the same on a disk.

    pip install --target MOTO 'moto[server]'
    python campaigns/table_stores.py FOLDER MOTO [PORT]

Starts moto's server on this machine, puts a table into a bucket as one file and as a directory, and
prepares, trains and forecasts by s3:// URLs: the files and weights must be those
of the disk. Then what is wrong: no bucket, no key, no server, keys that the server refuses.
A line of JSON per case, a summary at the end.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

from pyarrow import fs
from pyarrow import parquet as pq

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "tests")]

from series_frames import long_table  # noqa: E402

TRAIN = [
    *("--horizon", "6", "--input-size", "24", "--patch", "8", "--hidden-size", "16"),
    *("--steps", "20", "--threads", "1", "--no-tensorboard", "--split", "60/20/20"),
]
KEYS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}


def main() -> None:
    folder, moto = Path(sys.argv[1]), sys.argv[2]
    port = sys.argv[3] if sys.argv[3:] else "5155"
    folder.mkdir(parents=True, exist_ok=True)
    url = f"http://127.0.0.1:{port}"
    os.environ |= {**KEYS, "AWS_REGION": "us-east-1", "AWS_ENDPOINT_URL": url}
    os.environ |= {"FASTLSTM_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", port],
        env={**os.environ, "PYTHONPATH": moto},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_for(url)
        cases = [*same_as_on_disk(folder), *what_is_wrong(folder, url)]
    finally:
        server.kill()
        server.wait()
    for case in cases:
        print(json.dumps(case), flush=True)
    print(f"{sum(case['is_good'] for case in cases)} of {len(cases)} as expected")


def wait_for(url: str) -> None:
    for _ in range(200):
        try:
            urllib.request.urlopen(url, timeout=1).close()
            return
        except OSError:
            time.sleep(0.1)
    raise SystemExit(f"no server at {url}")


def run(*arguments: object, **environment: str) -> tuple[int, str, str]:
    """Runs fastlstm; returns its exit code, standard output and standard error."""
    command = [sys.executable, "-m", "fastlstm", *map(str, arguments)]
    asked = {**os.environ, **environment}
    done = subprocess.run(command, env=asked, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


def same_as_on_disk(folder: Path) -> list[dict[str, Any]]:
    store = fs.FileSystem.from_uri("s3://shop/?allow_bucket_creation=true")[0]
    store.create_dir("shop")
    table, path, out = long_table(400, 600), folder / "sales.parquet", folder / "run"
    pq.write_table(table, path)
    put(store, "shop/sales.parquet", path)
    for number in range(3):
        part = folder / f"{number}.parquet"
        pq.write_table(table.slice(80_000 * number, 80_000), part)
        put(store, f"shop/sales/{number}.parquet", part)
    assert run("train", path, "--out", out, *TRAIN)[0] == 0
    assert run("forecast", out, path, "--out", folder / "one.parquet")[0] == 0
    cases = []
    for source in ("s3://shop/sales.parquet", "s3://shop/sales/", "s3://shop/sal*/*.parquet"):
        code, _, told = run("forecast", out, source, "--out", "s3://shop/one.parquet")
        is_same = (
            code == 0 and get(store, "shop/one.parquet") == (folder / "one.parquet").read_bytes()
        )
        cases.append({"what": f"forecast {source}", "is_good": is_same, "told": told})
    source = "s3://shop/sales.parquet"
    code, _, told = run("train", source, "--out", folder / "remote", *TRAIN)
    weights = [(place / "model.safetensors").read_bytes() for place in (out, folder / "remote")]
    is_same = code == 0 and weights[0] == weights[1]
    cases.append({"what": "train", "is_good": is_same, "told": told[-300:]})
    return cases


def what_is_wrong(folder: Path, url: str) -> list[dict[str, Any]]:
    run_path, cases = folder / "run", []
    refused = {"AWS_ACCESS_KEY_ID": "other"}
    for what, arguments, environment, expected in (
        ("no bucket", ["prepare", "s3://nowhere/a.csv"], {}, "the store has no nowhere"),
        ("no key", ["prepare", "s3://shop/gone.csv"], {}, "there is no file s3://shop/gone.csv"),
        ("no file below", ["prepare", "s3://shop/sales/*.csv"], {}, "has no table"),
        ("no bucket to write", ["forecast", run_path, "s3://shop/sales.parquet", "--out",
         "s3://nowhere/a.csv"], {}, "there is no such bucket"),
        ("no server", ["prepare", "s3://shop/sales.parquet"],
         {"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}, "check the address"),
        ("other keys", ["prepare", "s3://shop/sales.parquet"], refused, "AWS_ACCESS_KEY_ID"),
        ("keys in the URL", ["prepare", "s3://a:b@shop/sales.parquet"], {}, "the URL holds keys"),
        ("unknown scheme", ["prepare", "what://a/b.csv"], {}, "what:// cannot be opened"),
    ):  # fmt: skip
        if what == "other keys":  # from here on the server asks for them
            kind = {"Content-Type": "text/plain"}
            request = urllib.request.Request(f"{url}/moto-api/reset-auth", b"0", kind)
            urllib.request.urlopen(request).close()
        code, _, told = run(*arguments, **environment)
        is_good = code in (1, 2) and expected in told and told.count("\n") == 1
        cases.append({"what": what, "is_good": is_good, "told": told})
    return cases


def put(store: Any, key: str, path: Path) -> None:
    with store.open_output_stream(key) as stream:
        stream.write(path.read_bytes())


def get(store: Any, key: str) -> bytes:
    with store.open_input_stream(key) as stream:
        data: bytes = stream.read()
    return data


if __name__ == "__main__":
    main()
