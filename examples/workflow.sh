#!/bin/sh
# From a text model as a Keras tutorial trains it to one that is better, faster, smaller and served,
# with a table of what each step gained, measured on this machine.
#
#     sh examples/workflow.sh [SOURCE] [SECONDS]
#
# SOURCE is a text as `fastlstm train` takes it; python-docs, the default, ships with Python. Three
# models are trained for SECONDS each: 60, the default, makes 5 to 8 minutes in all. Runs, answers
# (*.json), logs and the page of all runs stay in a new directory, workflow-DATE-TIME.
set -eu

source=${1:-python-docs} seconds=${2:-60}
examples=$(cd "$(dirname "$0")" && pwd)

fail() { # MESSAGE EXIT_CODE
    printf 'workflow: %s\n' "$1" >&2
    exit "$2"
}

run() { # STEP COMMAND...: what the command prints goes to STEP.json
    step=$1
    shift
    printf '%-15s  %s\n' "$step" "$*" >&2
    "$@" >"$step.json" 2>"$step.log" </dev/null ||
        fail "step '$step' failed with exit code $?: $(tail -n 1 "$step.log")" 1
}

next_command() { # STEP
    python3 "$examples/workflow_table.py" command "$1" 2>table.log ||
        fail "step '$1' printed no command: $(tail -n 1 table.log)" 1
}

[ $# -le 2 ] || fail "it takes a SOURCE and SECONDS, $# arguments came" 2
case $seconds in
'' | *[!0-9]*) fail "SECONDS is '$seconds', expected a whole number such as 60" 2 ;;
esac
for program in fastlstm python3; do
    command -v $program >/dev/null || fail "there is no $program on PATH; activate its environment" 2
done
if [ -e "$source" ]; then # its place as seen from the new directory
    source=$(cd "$(dirname "$source")" && pwd)/$(basename "$source")
fi
work=workflow-$(date +%Y%m%d-%H%M%S)
mkdir "$work"
cd "$work"

# As in tutorials: shuffled windows of 100 characters, LSTM(256), Adam as in Keras, one thread.
# shellcheck disable=SC2086 # $tutorial and $models are several words
tutorial="--order windows --batch-size 128 --seq-length 100 --rnn-size 256 --embed-size 64
    --dropout 0.2 --optimizer adam --learning-rate 0.001 --warmup 0 --cooldown 0
    --precision fp32 --threads 1 --budget ${seconds}s"
run tutorial fastlstm train "$source" $tutorial --out tutorial

# What holds it back? The first command that profile recommends is run as printed, if there is one.
run profile fastlstm profile "$source" $tutorial --out profiled --json
command=$(next_command profile)
models="tutorial${command:+ profiled}"
if [ "$command" ]; then eval "run profiled $command"; fi

# Which settings end best in the same time? The command that tune found is run as printed.
run tune fastlstm tune "$source" --budget "${seconds}s" --out tuning --json
command=$(next_command tune)
eval "run tuned $command"
mv runs/* tuned # where that command trains

run compare fastlstm compare $models tuned --json
run compress fastlstm compress tuned --to int8 --out compressed --json
for model in $models tuned compressed; do
    run "test-$model" fastlstm evaluate "$model" "$source" --split test --json
done
run export fastlstm export compressed --to onnx --out exported --json
run serve python3 "$examples/workflow_client.py" compressed # starts `fastlstm serve compressed`
run monitor fastlstm monitor . --export page.html

run table python3 "$examples/workflow_table.py" table "$seconds"
cat table.json
echo "Runs, answers, logs and page.html are in $work" >&2
