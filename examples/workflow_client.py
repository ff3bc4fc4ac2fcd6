# %% [markdown]
# Part of examples/workflow.sh: starts a server of a run and reads from it, as one client and as 16.
#
#     python examples/workflow_client.py RUN
#
# Prints the characters per second that came, as JSON. Python's standard library is all it needs.

# %% One request: OpenAI's completions. An empty prompt starts a text.
import json
import re
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

CLIENTS = 16


def characters(address, seed, length):
    """Returns how many characters came."""
    body = {"prompt": "", "max_tokens": length, "temperature": 0.7, "seed": seed}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{address}v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=300) as reply:
        return len(json.load(reply)["choices"][0]["text"])


# %% Several requests at once.
def characters_per_s(address, clients, length=50_000):
    started = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        total = sum(pool.map(lambda seed: characters(address, seed, length), range(clients)))
    return total / (time.perf_counter() - started)


# %% The server says where it is once it is ready; if it cannot start, it says why and ends.
command = ["fastlstm", "serve", sys.argv[1], "--port", "0", "--no-log"]
with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
    last = ""
    for line in server.stderr:
        last = line.strip()
        if found := re.search(r" at (http\S+)", line):
            break
    else:
        sys.exit(last or "fastlstm serve ended without a word")
    try:
        characters_per_s(found[1], CLIENTS, 100)  # the first requests are slower
        one, together = (characters_per_s(found[1], number) for number in (1, CLIENTS))
    finally:
        server.terminate()
print(json.dumps({"clients": CLIENTS, "one": one, "together": together}))
