"""Plants bugs in a copy of the sources, one at a time: the tests must catch each.

A bug that survives is a test that is missing. The checkout itself is never touched. Bugs in C++
need nanobind beside the packages of `make test`; only a CPU with AMX catches those of AMX.

usage: python campaigns/planted_bugs.py [--only TEXT] [--start 0]
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from trainer_bugs import TRAINER_BUGS

from fastlstm.system.hardware import native

REPOSITORY = Path(__file__).resolve().parents[1]
TESTS = [
    "tests/ops/backends/test_native.py",
    "tests/ops/backends/test_native_cell_options.py",
    "tests/ops/backends/test_native_random.py",
    "tests/ops/backends/test_native_memory.py",
    "tests/ops/test_both_directions.py",
    "tests/nn/test_changed_weights.py",
    "tests/nn/test_convert.py",
    "tests/nn/test_prepared.py",
    "tests/nn/test_lstm_derivatives.py",
    "tests/nn/test_lstm_lengths.py",
]
TESTS_OF_DECODING = [
    *("tests/text/test_decoder.py", "tests/text/test_decoder_streams.py"),
    "tests/text/test_sampling.py",
]
TESTS_OF_SERIES = [
    "tests/forecast/data",
    "tests/forecast/model/test_network.py",
    "tests/forecast/test_calibration.py",
    "tests/forecast/test_channels.py",
    "tests/forecast/test_forecaster.py",
    "tests/forecast/test_task.py",
    "tests/forecast/test_train.py",
    "tests/forecast/test_training_options.py",
    "tests/sequence/test_data.py",
    "tests/sequence/test_estimators.py",
    "tests/training/test_trainer_recovery.py",
]
TESTS_OF_TRAINER = [
    "tests/training/test_trainer.py",
    "tests/training/test_trainer_recovery.py",
    "tests/training",
    "tests/text/test_task.py",
    "tests/text/test_train.py",
    "tests/forecast/test_task.py",
    "tests/sequence/test_train.py",
    "tests/golden",
]
TESTS_OF_PROJECTION = ["tests/ops/test_projection.py", "tests/nn/test_loss.py"]
TIMEOUT_S = 900  # the trainer's tests take minutes; more than this is a hang
# The finder of an editable install comes before PYTHONPATH: without it the copy is imported.
SITE = """import sys
sys.meta_path[:] = [f for f in sys.meta_path if "ScikitBuild" not in type(f).__name__]
"""


class Bug(NamedTuple):
    name: str
    file: str  # below src/fastlstm
    old: str
    new: str

    @property
    def is_native(self) -> bool:
        return self.file.endswith((".h", ".cpp"))

    @property
    def tests(self) -> list[str]:
        """The tests that should catch it."""
        if self.name.startswith("series: "):
            return TESTS_OF_SERIES
        if self.name.startswith("trainer: "):
            own = f"tests/training/test_{Path(self.file).stem}.py"
            return [*([own] if (REPOSITORY / own).exists() else []), *TESTS_OF_TRAINER]
        if self.name.startswith("projection: "):
            return TESTS_OF_PROJECTION
        is_decoding = self.name.startswith(("decode: ", "sampler: ", "stream: "))
        return TESTS_OF_DECODING if is_decoding else TESTS


SIMD, ACTIVATIONS = "csrc/cpu/simd.h", "csrc/cpu/activations.h"
PORTABLE = "csrc/cpu/isa_portable.h"
GEMM, AMX, PACK = "csrc/cpu/gemm.h", "csrc/cpu/gemm_amx.h", "csrc/cpu/pack.h"
FORWARD, BACKWARD = "csrc/cpu/lstm_forward.h", "csrc/cpu/lstm_backward.h"
WEIGHTS, KERNELS = "csrc/cpu/weight_gradient.h", "ops/kernels.py"
CELL, NORM = "csrc/cpu/cell.h", "csrc/cpu/norm.h"
NORM_FORWARD, NORM_BACKWARD = "csrc/cpu/norm_forward.h", "csrc/cpu/norm_backward.h"
PROJECTION = "csrc/cpu/projection.h"
DECODE, SAMPLER = "csrc/cpu/decode_step.h", "csrc/cpu/sampler.h"
STREAM = "csrc/decode_stream.cpp"
QUANTIZED, QUANTIZED_AMX = "csrc/cpu/quantized.h", "csrc/cpu/quantized_amx.h"
PREPARED, AUTOGRAD, PARTS = "nn/prepared.py", "ops/autograd.py", "ops/checkpointing.py"
PACKED, OPERATOR = "ops/packed_weights.py", "ops/custom_op.py"
BINDINGS, NATIVE_CALL = "csrc/lstm_bindings.cpp", "ops/native_call.py"
DECODE_BINDINGS = "csrc/decode_bindings.cpp"
WINDOWS_CPP, WINDOW_LOADER = "csrc/windows.cpp", "forecast/data/window_loader.py"
ARRANGE = "forecast/data/arrange.py"
INGEST, SPLITS = "forecast/data/ingest.py", "forecast/data/splits.py"
PADDING = "forecast/data/padding.py"
NETWORK = "forecast/model/network.py"
CALIBRATION, OUTPUTS = "forecast/calibration.py", "forecast/model/outputs.py"
SEQUENCE_NETWORK, SEQUENCES = "sequence/model.py", "sequence/data.py"
COUNTS, ERROR_MEASURES = "forecast/data/preparation.py", "forecast/data/error_measures.py"
FUTURE_COVARIATES, TRAINER = "forecast/forecast_table.py", "training/trainer.py"
FORECAST_TASK = "forecast/task.py"
CHECKPOINT = "training/checkpoint.py"

BUGS = (
    Bug("gates i and f swapped", FORWARD, "cell.gate(gate[0]), f = cell.gate(gate[1])",
        "cell.gate(gate[1]), f = cell.gate(gate[0])"),
    Bug("last step left out", FORWARD, "for (int64_t t = 0; t < g.T; ++t) {",
        "for (int64_t t = 0; t + 1 < g.T; ++t) {"),
    Bug("h0 ignored", FORWARD,
        "Vec h = g.h0 == nullptr ? Vec{} : load_part<Float32>(g.h0 + b * g.H + k, count);",
        "Vec h{};"),
    Bug("c0 ignored", FORWARD,
        "const Vec c = g.c0 == nullptr ? Vec{} : load_part<Float32>(g.c0 + b * g.H + k, count);",
        "const Vec c{};"),
    Bug("h0 without mask", FORWARD, "count);\n      if (g.recurrent_mask != nullptr) {",
        "count);\n      if (false) {"),
    Bug("begins and ends swapped", FORWARD, "t >= begins[b]) && (ends == nullptr || t < ends[b])",
        "t >= ends[b]) && (ends == nullptr || t < begins[b])"),
    Bug("ends included", FORWARD, "t < ends[b]", "t <= ends[b]"),
    Bug("y not zero outside a lane", FORWARD, "      out = Vec{};\n", ""),
    Bug("h_last of the last step", FORWARD, "(g.row(end - 1) + b)", "(g.row(g.T - 1) + b)"),
    Bug("state padding not zeroed", FORWARD, "++k) row[k] = 0;", "++k) (void)row;"),
    Bug("one state for two steps", FORWARD, "states + (step & 1) * num_lanes * state_stride",
        "states + (step & 0) * num_lanes * state_stride"),
    Bug("kept cells of the step before", FORWARD,
        "if (g.cells != nullptr) kept_cells.first += g.B * n.hidden;\n    const auto",
        "if (g.cells != nullptr && t > 0) kept_cells.first += g.B * n.hidden;\n    const auto"),
    Bug("the scratch of all threads at one place", FORWARD,
        "carver.take<char>(lanes.begin * of_lane + thread * kPage);",
        "(void)thread;"),
    Bug("the input of a thread's lanes beside it", FORWARD, "inputs - lanes.begin * projected",
        "inputs - (lanes.begin + (lanes.begin > 0)) * projected"),
    Bug("token row off by one", FORWARD, "tokens ? tokens[b]",
        "tokens ? (tokens[b] + 1) % g.input.num_rows"),
    Bug("projection of another chunk", FORWARD, "is_dense && t % s.steps == 0",
        "is_dense && t == 0"),
    Bug("kept g and o swapped", FORWARD, "Format::stream(kept + 2 * kLanes, z)",
        "Format::stream(kept + 2 * kLanes, o)"),
    Bug("no barrier in forward", FORWARD, "step);\n      me.barrier->wait(me.count);\n",
        "step);\n"),
    Bug("no barrier in backward", BACKWARD, "step);\n    }\n    me.barrier->wait(me.count);\n",
        "step);\n    }\n"),
    Bug("no barrier before weights", BACKWARD,
        "my, engine, has_carry);\n  me.barrier->wait(me.count);\n", "my, engine, has_carry);\n"),
    Bug("carry not reset", BACKWARD, "active ? Vec{} : dh);", "dh);"),
    Bug("mask not in backward", BACKWARD,
        " dh = Float32::load(sums + q * kLanes);\n        if (g.recurrent_mask != nullptr)",
        " dh = Float32::load(sums + q * kLanes);\n        if (false)"),
    Bug("mask not in dh0", BACKWARD,
        "                     if (g.recurrent_mask != nullptr) {",
        "                     if (false) {"),
    Bug("dh of the last state ignored", BACKWARD, "read(g.dh_last)", "Vec{}"),
    Bug("h0 not in dw_hh", BACKWARD, "read(g.h0)", "Vec{}"),
    Bug("tanh' of c", BACKWARD, "const Vec squashed = rule.squash(c);",
        "const Vec squashed = c;"),
    Bug("derivative of f", CELL, "dc * old * cell.gate_slope(f)", "dc * old * (1.0f - f)"),
    Bug("new cell for the old one", BACKWARD, "old = Float32::load(cells",
        "old = Float32::load(new_cells"),
    Bug("dc not carried", BACKWARD, "? d.old + dc_kept : d.old);",
        "? dc * f + dc_kept : Vec{});"),
    Bug("gate gradient of an idle lane", BACKWARD, "for (int j = 0; j < 4; ++j) Format::store(gate",
        "for (int j = 0; j < 3; ++j) Format::store(gate"),
    Bug("dx chunk offset", BACKWARD, "(g.dx) + order.first * g.I;\n  const auto chunk",
        "(g.dx) + t / s.steps * g.B * g.I;\n  const auto chunk"),
    Bug("dx of a lane's rows", BACKWARD, "rows{k * g.B + lanes.begin, k * g.B + lanes.end}",
        "rows{lanes.begin, lanes.end}"),
    Bug("gradient of the wrong token", BACKWARD,
        "g.input.tokens[g.row(row.step) + row.lane] * kGroup",
        "(g.input.tokens[g.row(row.step) + row.lane] + 1) % g.input.num_rows * kGroup"),
    Bug("both: order of a short chunk", FORWARD, "ChunkOrder::of(g, t, steps)",
        "ChunkOrder::of(g, t, s.steps)"),
    Bug("both: output before a step", FORWARD, "(g.row(t - 1) + b) * g.y_stride",
        "(g.row(t - 1) + b) * g.H"),
    Bug("both: state before a reversed step", BACKWARD, "(g.is_reversed ? -g.B : g.B) * g.y_stride",
        "g.B * g.y_stride"),
    Bug("both: one barrier", BINDINGS, "&barriers[which]", "&barriers[0]"),
    Bug("both: one workspace", BINDINGS, "    memory += bytes_of(call);\n", ""),
    Bug("both: one memory of packed weights", PACKED, "kept.get(index)", "kept.get(0)"),
    Bug("both: gradient of the other output", NATIVE_CALL, "at = k * H * y.itemsize", "at = 0"),
    Bug("frequent tokens summed plainly", BACKWARD, "is_compensated = Format::kPair == 1 && ",
        "is_compensated = false && "),
    Bug("padding reaches the weights", WEIGHTS,
        "} else if (has_padding && !is_active(begins, ends, r.step, r.lane)) {",
        "} else if (false) {"),
    Bug("carry of a short lane left", BACKWARD,
        "is_last || (g.ends != nullptr && t + 1 == g.ends[b])", "is_last"),
    Bug("norm: an idle lane's NaN kept", NORM_BACKWARD,
        "active ? first_lanes(d_ih * scale_ih, count) : Vec{}",
        "first_lanes(d_ih * scale_ih, count)"),
    Bug("lost bits not cleared", BACKWARD,
        "      if (s.is_compensated) Float32::store(s.lost.at(0, u, 0) + k, Vec{});\n", ""),
    Bug("scratch used too early", BACKWARD,
        "  me.barrier->wait(me.count);  // the table is whole", "  // the table is whole"),
    Bug("weight chunk not accumulated", WEIGHTS,
        "const bool is_first = chunk.begin == 0;",
        "const bool is_first = number < 2;"),
    Bug("mask not in dw_hh", WEIGHTS, "    if (mask != nullptr) v *=", "    if (false) v *="),
    Bug("first state of a late lane", WEIGHTS, "if (r.step <= (begins", "if (r.step < (begins"),
    Bug("bias of the wrong gate", WEIGHTS, "n.row_of(strip * kLanes + l);",
        "n.row_of((width == 1 ? strip ^ 1 : strip) * kLanes + l);"),
    Bug("chunk padding not zeroed", WEIGHTS,
        "return r < chunk.count ? base", "return r <= chunk.count ? base"),
    Bug("no barrier after transposing", WEIGHTS,
        "    me.barrier->wait(me.count);\n    items.each", "    items.each"),
    Bug("parts of a product not summed", GEMM, "p > 0, out[block - first]",
        "false, out[block - first]"),
    Bug("last row block left out", GEMM,
        "out[kGroup][Engine::kRows * kStrips * kLanes];\n"
        "  const int64_t blocks = ceil_div(rows.end - rows.begin, Engine::kRows);",
        "out[kGroup][Engine::kRows * kStrips * kLanes];\n"
        "  const int64_t blocks = min_of(24, ceil_div(rows.end - rows.begin, "
        "Engine::kRows));"),
    Bug("high half of a pair lost", GEMM, "load_words(b + s * strip_stride) & 0xffff0000u",
        "load_words(b + s * strip_stride) & 0u"),
    Bug("rows widened from the start again", GEMM, "a.rows + r * a.row_stride + first;",
        "a.rows + r * a.row_stride;"),
    Bug("second pass of strips in the place of the first", GEMM,
        "strip_stride, inner, add,\n"
        "                                     out + s * kLanes, row);",
        "strip_stride, inner, add,\n                                     out, row);"),
    Bug("tiles configured once", "csrc/cpu/tiles.h", "if (rows == rows_) return;",
        "if (rows_ != 0) return;"),
    Bug("second tile reads too many rows", "csrc/cpu/tiles.h", "rows > 16 ? rows - 16 : 1",
        "rows > 16 ? 16 : 1"),
    Bug("second tile one row early", AMX, "a.rows + 16 * a.row_stride + k",
        "a.rows + 15 * a.row_stride + k"),
    Bug("rows of the last block unfinished", AMX,
        "    }\n  }\n  while (pending.row < pending.end) finish_row();",
        "    }\n  }\n  while (pending.row + 1 < pending.end) finish_row();"),
    Bug("last lane not stored", SIMD, "for (int64_t k = 0; k < n; ++k) p[k] = whole[k];",
        "for (int64_t k = 0; k + 1 < n; ++k) p[k] = whole[k];"),
    Bug("a whole vector loaded at the end", SIMD, "if (n >= kLanes) return Format::load(p);",
        "if (n >= kLanes - 1) return Format::load(p);"),
    Bug("transposed with the wrong stride", SIMD, "internal::exchange_rows<2>(rows);",
        "internal::exchange_rows<1>(rows);"),
    Bug("bf16 cut instead of rounded", PORTABLE,
        "const Words rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;",
        "const Words rounded = u >> 16;"),
    Bug("NaN swallowed", PORTABLE, "return b < a ? b : a;",
        "return a < b ? a : b;"),
    Bug("clamp of sigmoid", ACTIVATIONS, "splat(-80.0f)), splat(80.0f)",
        "splat(-8.0f)), splat(8.0f)"),
    Bug("clamp of tanh", ACTIVATIONS, "splat(-30.0f)), splat(30.0f)",
        "splat(-3.0f)), splat(3.0f)"),
    Bug("rows beyond the last unit packed", PACK, "return at < 4 * count ?",
        "return at <= 4 * count ?"),
    Bug("bias of another gate packed", PACK, "at = s % 4 * args.H + k",
        "at = (s % 4 ^ 1) * args.H + k"),
    Bug("column strip off by one gate", PACK, "n.row_of(at + k)",
        "n.row_of(at + (k + kLanes) % kGroup)"),
    Bug("sums of the last group with gaps", PACK, "Float32::load(sums + q * rest_)",
        "Float32::load(sums + q * kLanes)"),
    Bug("gradients of the last group with gaps", PACK, "Format::store(out + q * width, gates[q])",
        "Format::store(out + q * kLanes, gates[q])"),
    Bug("last gates left out of a product", PACK, "gate_inner(round_up(4 * H, Format::kInner))",
        "gate_inner(round_up(4 * H - 4, Format::kInner))"),
    Bug("packed weights known by name", PACKED, "self.address == t.data_ptr()", "True"),
    Bug("packed weights never renewed", PACKED, "self.version == _version(t)", "True"),
    Bug("padding of bf16 rows not zeroed", KERNELS, "flat.new_zeros(", "flat.new_empty("),
    Bug("gates used twice", AUTOGRAD, "if ctx.is_used:", "if False:"),
    Bug("operator: kept gates overwritten", OPERATOR, "gates=saved.gates.clone()",
        "gates=saved.gates"),
    Bug("operator: options forgotten", OPERATOR, "CellOptions(**dict(", "CellOptions() or (dict("),
    Bug("cell: hash without the row", CELL,
        "hash32((first_row_ + static_cast<uint32_t>(row)) ^ low)", "hash32(low)"),
    Bug("cell: threshold of c for h", CELL, "(drawn & 0xffffu) < threshold_h_",
        "(drawn & 0xffffu) < threshold_c_"),
    Bug("cell: expectation without seed", CELL, "is_random_(v->seed != nullptr)",
        "is_random_(true)"),
    Bug("cell: slope of hard_sigmoid", CELL, "(y > 0.0f) & (y < 1.0f)", "(y > 0.0f)"),
    Bug("cell: old output of a late lane", FORWARD,
        "if (t > (g.begins == nullptr ? 0 : g.begins[b])) {", "if (t > 0) {"),
    Bug("cell: zoneout's dh not carried", BACKWARD, "s.carry.at(k, b), keep.h * dh);",
        "s.carry.at(k, b), Vec{});"),
    Bug("cell: zoneout's dc not carried", BACKWARD, "? d.old + dc_kept : d.old);",
        "? d.old : d.old);"),
    Bug("cell: kept cell before zoneout", BACKWARD,
        "        c = new_cell(rule, i, f, z, old);\n", ""),
    Bug("cell: norm without groups' means", NORM, "squares += offset * offset * features;", ""),
    Bug("cell: norm counts padding", NORM, "sum_lanes(first_lanes(squares, count))",
        "sum_lanes(squares)"),
    Bug("cell: no barrier before outputs", NORM_FORWARD,
        "    }\n    meet();\n    merge_groups<1>", "    }\n    merge_groups<1>"),
    Bug("cell: scale of the wrong row", NORM_FORWARD, "scale_ih = ns.ih.scale()[input]",
        "scale_ih = ns.ih.scale()[b]"),
    Bug("cell: gamma of another gate", NORM_FORWARD, "p + q * H + k, H - k",
        "p + (q ^ 1) * H + k, H - k"),
    Bug("cell: mean of dn not taken off", NORM_BACKWARD,
        "dn * gamma_c - ns.mean(0, b) - c * ns.mean(1, b)", "dn * gamma_c - c * ns.mean(1, b)"),
    Bug("cell: norm's lane that is idle", NORM_BACKWARD,
        "          Float32::store(d_gate + q * kLanes, Vec{});\n", ""),
    Bug("cell: norm scratch used too early", NORM_BACKWARD,
        "  me.barrier->wait(me.count);  // the scratch can be used anew\n", ""),
    Bug("cell: sums of the last step only", NORM_BACKWARD, "Float32::load(sum) + v);", "v);"),
    Bug("ready: weights may change", PREPARED,
        "not known.is_still(weights[k * num : (k + 1) * num], self.layers[k][0])", "False"),
    Bug("ready: state of the first layer", PREPARED, "k * B * H * h.itemsize", "0"),
    Bug("parts: lengths not shifted", PARTS, "(t - first).clamp(0, T)", "t.clamp(0, T)"),
    Bug("parts: state of the next part", PARTS, "h, c = states[2 * number : 2 * number + 2]",
        "h, c = states[-2:]"),
    Bug("parts: no gradient of the state", PARTS,
        "            dh, dc = gradients.h0, gradients.c0\n", ""),
    Bug("parts: weights of one part only", PARTS, "            sum_ += more\n",
        "            pass\n"),
    Bug("parts: draws begin anew", CELL, "first_row_ + static_cast<uint32_t>(row)",
        "static_cast<uint32_t>(row)"),
    Bug("projection: target of another row", PROJECTION, "g.targets[first + row]",
        "g.targets[row]"),
    Bug("projection: bias left out", PROJECTION, "if (g.bias != nullptr) v +=",
        "if (false) v +="),
    Bug("projection: no chance is small", PROJECTION, "splat(-80.0f)", "splat(-8.0f)"),
    Bug("projection: the largest not taken off", PROJECTION,
        "Float32::load(logits + k) - highest,", "Float32::load(logits + k),"),
    Bug("projection: padding may be the largest", PROJECTION,
        "for (int64_t k = g.V; k < pad; ++k) logits[k] = -__builtin_inff();", "(void)pad;"),
    Bug("projection: no one at the target", PROJECTION, "    logits[target] -= sum;\n", ""),
    Bug("projection: scale not in df", PROJECTION,
        "Float32::load(sums + q * kLanes) * g.scale,\n", "Float32::load(sums + q * kLanes),\n"),
    Bug("projection: dw of the last chunk", PROJECTION,
        "if (!is_new) sum += load_part<Float32>(out, g.H - k);", "(void)is_new;"),
    Bug("projection: db of the last chunk", PROJECTION, "(is_new ? 0.0f : g.db[v])", "0.0f"),
    Bug("projection: features of the first chunk", PROJECTION,
        "static_cast<const typename Format::Element*>(g.features) + first * g.H;",
        "static_cast<const typename Format::Element*>(g.features) + 0 * first;"),
    Bug("projection: d not padded", PROJECTION,
        "k < stride; k += kLanes) Format::store(d + k, Vec{});",
        "k < stride; k += kLanes) (void)0;"),
    Bug("projection: rows beyond the last", PROJECTION,
        "for (int64_t r = rows.begin; r < end; r += kLanes * kPair)",
        "for (int64_t r = rows.begin; r < rows.end; r += kLanes * kPair)"),
    Bug("projection: odd rows left out", PROJECTION,
        "if (r + 1 < count) __builtin_memcpy(&high, at.features[r + 1] + k, sizeof high);", ""),
    Bug("projection: no meeting before weights", PROJECTION,
        "      me.barrier->wait(me.count);\n      project_weights", "      project_weights"),
    Bug("projection: no meeting after packing", PROJECTION,
        "  pack_projection(g, s, me);\n  me.barrier->wait(me.count);\n",
        "  pack_projection(g, s, me);\n"),
    Bug("projection: no meeting after a chunk", PROJECTION,
        "    me.barrier->wait(me.count);  // a shorter", "    // a shorter"),
    Bug("decode: gates i and f swapped", DECODE,
        "i = sigma(gate(0)), f = sigma(gate(1))", "i = sigma(gate(1)), f = sigma(gate(0))"),
    Bug("decode: row of another stream's token", DECODE, "m_.table + (s_.tokens[row] *",
        "m_.table + (s_.tokens[0] *"),
    Bug("decode: idle row loses its state", DECODE,
        "__builtin_memcpy(new_state + at, state + at, kLanes * sizeof(Element));", ""),
    Bug("decode: scale of the row left out", "csrc/cpu/right.h",
        "Float32::load(matrix.factors + strip * kLanes) * scale",
        "Float32::load(matrix.factors + strip * kLanes)"),
    Bug("decode: offset of the 128 left out", "csrc/cpu/right.h",
        "__builtin_memcpy(&offset, matrix.corrections + strip * kLanes, sizeof offset);",
        "offset = {};"),
    Bug("decode: residual not added", DECODE,
        "if (adds) y += Float32::load(value + at);", "(void)adds;"),
    Bug("decode: norm counts padding", DECODE,
        "squares += first_lanes(offset * offset, m_.H - u * kLanes);",
        "squares += offset * offset;"),
    Bug("decode: no meeting after a layer", DECODE,
        "        layer(k, step);\n        meet();\n", "        layer(k, step);\n"),
    Bug("decode: no meeting after the output", DECODE,
        "        multiply_output(step);\n        meet();\n", "        multiply_output(step);\n"),
    Bug("decode: rows between two parts left out", DECODE_BINDINGS, "end = count * (k + 1)",
        "end = count * (k + 1) - (k + 1 < num_parts)"),
    Bug("decode: padding has a chance", "text/decoder.py",
        'self._by_strips(arrays["output.bias"], -np.inf)',
        'self._by_strips(arrays["output.bias"], 0.0)'),
    Bug("decode: NaN not told", DECODE, "if (s_.broken[at] != 0) {", "if (false) {"),
    Bug("decode: state of an earlier step", DECODE, "s_.state(k, steps_) + row",
        "s_.state(k, 0) + row"),
    Bug("decode: second set of sums left out", QUANTIZED,
        "if constexpr (kSets == 2) sum[0][r][s] += sum[1][r][s];", ""),
    Bug("decode: odd bytes of weights left out", PORTABLE,
        "return add_pairs(add_pairs(sum, a.even, bits_of<Words>(even)), a.odd",
        "return add_pairs(add_pairs(sum, a.even, bits_of<Words>(even)), Words{}"),
    Bug("decode: second tile of rows left out", QUANTIZED_AMX,
        "      _tile_stored(2, out + 16 * kRow, kRow * 4);\n", ""),
    Bug("sampler: draws do not count", SAMPLER, "sampler.num_drawn++", "sampler.num_drawn"),
    Bug("sampler: top-k one too many", SAMPLER, "kept.count >= sampler.top_k",
        "kept.count > sampler.top_k"),
    Bug("sampler: top-p before top-k", SAMPLER,
        "    if (bound > kLowest) pool = narrowed(s, pool, bound, 1.0f, {});\n"
        "    const Kept found = kept_above<true>(pool, bound);",
        "    const Kept found = kept_above<true>(pool, kLowest);"),
    Bug("sampler: a token twice is changed twice", SAMPLER,
        "total + (before[k] - total)", "total + (l[sampler.recent[k]] - total)"),
    Bug("sampler: stops may begin in the prompt", SAMPLER,
        "bool is_end = length <= sampler.num_written;", "bool is_end = true;"),
    Bug("activations: a bare reciprocal", "csrc/cpu/isa_x86.h",
        "return q + q * (1.0f - d * q);", "return q;"),
    Bug("fork: the parent's pool", "csrc/cpu/threads.cpp", "  pool = new Pool;\n", ""),
    Bug("fork: the parent's OpenMP", "csrc/cpu/threads.cpp", "  openmp = nullptr;\n", ""),
    Bug("stream: two calls at once", "csrc/decode_bindings.cpp", "stream.is_busy.exchange(true)",
        "stream.is_busy.exchange(false)"),
    Bug("stream: written token remembered twice", STREAM, "    knows_first = true;\n", ""),
    Bug("stream: counts not saved", STREAM, "  append(out, counts_);\n",
        "  append(out, std::vector<uint16_t>(counts_.size()));\n"),
    Bug("stream: draws not saved", STREAM, "header.num_drawn = sampler_.num_drawn;", ""),
    Bug("stream: penalties of a later part", STREAM, "  if (counts_.empty()) use_counts();", ""),
    Bug("ready: another autocast", PREPARED,
        '        and torch.get_autocast_dtype("cpu") is dtype\n', ""),
    Bug("ready: another layout", PREPARED, "            or not x.is_contiguous()\n", ""),
    Bug("stale packing after a fused step", PACKED, "_fused_steps += any(",
        "_fused_steps += 0 * any("),
    Bug("stale packing after a write through .data", PACKED,
        "            and self.fingerprint.is_still(threads)\n", ""),
    Bug("series: a number too large is kept", WINDOWS_CPP, "while (x >= size_)",
        "while (x > size_)"),
    Bug("series: a window of the segment before", WINDOWS_CPP, "std::upper_bound(",
        "std::lower_bound("),
    Bug("series: stride left out", WINDOWS_CPP, "(window - before) * index.stride",
        "(window - before)"),
    Bug("series: every order begins alike", WINDOWS_CPP, "offsets_[round] = next_random(key);",
        "offsets_[round] = 0;"),
    Bug("series: a group begins anew each epoch", WINDOWS_CPP,
        "epoch * turns + draw / num_groups", "draw / num_groups"),
    Bug("series: every pass of a group alike", WINDOWS_CPP, "{group, drawn / size}",
        "{group, int64_t{0}}"),
    Bug("series: one order for all groups", WINDOWS_CPP, "{group, drawn / size}",
        "{drawn / size}"),
    Bug("series: turns of the first groups", WINDOWS_CPP, "(group < all % num_groups ? 1 : 0)",
        "0"),
    Bug("series: seed not in the groups", WINDOWS_CPP, "uint64_t key = seed;",
        "uint64_t key = 0;"),
    Bug("series: a missing int16 is a number", WINDOWS_CPP,
        "cell == std::numeric_limits<int16_t>::min()", "false"),
    Bug("series: small halves are zero", WINDOWS_CPP, "static_cast<float>(fraction) * 0x1p-24f",
        "static_cast<float>(fraction) * 0.0f"),
    Bug("series: a window across the end", "forecast/data/window_index.py",
        "(last - first - length) // stride + 1", "(last - first - length) // stride + 2"),
    Bug("series: a buffer in use is written", WINDOW_LOADER,
        "weakref.finalize(buffer, self._unused.append, memory).atexit = False",
        "self._unused.append(memory)"),
    Bug("series: last batch dropped", WINDOW_LOADER,
        "-(-self.num_windows // batch_size)",
        "max(self.num_windows // batch_size, 1)"),
    Bug("series: every rank the same windows", WINDOW_LOADER,
        "np.arange(own.start, own.stop)", "np.arange(own.stop - own.start)"),
    Bug("series: position of the batch itself", WINDOW_LOADER,
        "        self._advance()\n        return batch\n", "        return batch\n"),
    Bug("series: rows of a series in another order", ARRANGE, 'np.argsort(codes, kind="stable")',
        "np.argsort(codes)[::-1]"),
    Bug("series: a gap is crossed", ARRANGE, "np.flatnonzero(gap | ~same)",
        "np.flatnonzero(~same)"),
    Bug("series: the other duplicate counts", ARRANGE,
        'doubles if self._options.duplicates == "first"',
        'doubles if self._options.duplicates == "last"'),
    Bug("series: filled rows in the wrong place", ARRANGE, "rows + before[segments.of_rows(rows)]",
        "rows + before[0]"),
    Bug("series: infinities pass", "forecast/data/column_stats.py",
        "return int(infinite[0])", "return None"),
    Bug("series: hash alone tells names apart", "csrc/text_keys.cpp",
        "slots_[place].hash == hash && is_text(slots_[place].number - 1, text, bytes_of(i))",
        "(slots_[place].hash & 0xfff) == (hash & 0xfff)"),
    Bug("series: name of the row before", "csrc/text_keys.cpp",
        "std::memcmp(text, text - bytes, bytes) == 0", "true"),
    Bug("series: categories by batch", "forecast/data/names.py",
        "self._numbers.setdefault(name, len(self._values))", "{}.setdefault(name, 0)"),
    Bug("series: validation begins too late", SPLITS, "before - input_size", "before"),
    Bug("series: the scaler sees all rows", SPLITS,
        "is_used = np.arange(begin, end) < ends[of]", "is_used = ends[of] > -1"),
    Bug("series: the rest is cut at the end of all series", SPLITS,
        "[ends[of_series] - after", "[ends.max() - after"),
    Bug("series: padding counts as rows of the parts", PADDING,
        "frequency.ticks(segments.start_times) + added", "frequency.ticks(segments.start_times)"),
    Bug("series: padding does not move the months back", PADDING, "1, -num)[0]", "1, 0)[0]"),
    Bug("series: every segment is padded", "forecast/data/table.py",
        "np.diff(self.series, prepend=-1) != 0", "self.series >= 0"),
    Bug("series: a forecast reads the table unpadded", COUNTS,
        "padded(dataset, config.pad_start or 0)", "dataset"),
    Bug("series: the future is seen", NETWORK, "values[:, L:, C + config.num_past :]",
        "values[:, L:, C : C + config.num_future]"),
    Bug("series: the joint path reads the oldest lags", NETWORK,
        "targets[:, -self.config.num_joint_lags :]", "targets[:, : self.config.num_joint_lags]"),
    Bug("series: directions of the first layer", NETWORK, "[hidden[-2], hidden[-1]]",
        "[hidden[0], hidden[1]]"),
    Bug("series: the plan of another step", FUTURE_COVARIATES,
        "rows = rows.reshape(-1)", "rows = np.repeat(rows[:, 0], times.shape[1])"),
    Bug("series: names ahead keep their numbers", FUTURE_COVARIATES,
        "renumbered(values[..., place], numbers)", "values[..., place]"),
    Bug("series: resumed without its best weights", CHECKPOINT, "tensors.get(BEST, {})", "{}"),
    Bug("series: resumed from the first window", CHECKPOINT,
        "trainer.task.loader.load_state_dict(trainer.state.restore(tensors, meta, is_roll_back))",
        "trainer.state.restore(tensors, meta, is_roll_back)"),
    Bug("series: the last weights are evaluated", TRAINER,
        "        self.best.into_model()\n        finish =", "        finish ="),
    Bug("series: each part of a batch has its own mean", FORECAST_TASK,
        "self._summed(parameters, part.actual) / part.count",
        "self._summed(parameters, part.actual) / part.actual.numel()"),
    Bug("series: missing values count", FORECAST_TASK, "return int((~target.isnan()).sum())",
        "return target.numel()"),
    Bug("series: parts continue from the state of the first", FORECAST_TASK,
        "cells = slice(part.start * each, part.stop * each)",
        "cells = slice(0, (part.stop - part.start) * each)"),
    Bug("series: the carried state is not reset", TRAINER,
        "            task.reset_state()\n", "            pass\n"),
    Bug("series: the same learning rate after a roll-back", TRAINER,
        "before.lr_scale * 0.5", "before.lr_scale"),
    Bug("series: the center for its quantiles", CALIBRATION,
        "base = output.quantiles(parameters, LEVELS)",
        "base = output.center(parameters)[..., None]"),
    Bug("series: losses upside down", ERROR_MEASURES, "np.asarray(self.levels) * above",
        "(1 - np.asarray(self.levels)) * above"),
    Bug("series: padding counts in the mean", SEQUENCE_NETWORK, "lengths[:, None]", "len(steps)"),
    Bug("series: padding is read", SEQUENCE_NETWORK, ", lengths=lengths)", ")"),
    Bug("series: missing steps look like zeros", SEQUENCE_NETWORK, "(~steps.isnan()).to(steps)",
        "torch.ones_like(steps)"),
    Bug("series: held-out sequences are scaled by", SEQUENCES, "is_used[numbers] = True",
        "is_used[:] = True"),
    Bug("series: residuals of another level", CALIBRATION,
        "return Calibration(shifts, noise)", "return Calibration(shifts.flip(0), noise)"),
    Bug("series: intervals of few values too narrow", CALIBRATION, "* (count + 1)", "* count"),
    Bug("series: a missing value is carried by no one", "forecast/data/naive.py",
        "np.isnan(found).any(-1) & (sources", "np.isnan(found).all(-1) & (sources"),
    Bug("series: quantiles cross", CALIBRATION, "known = known.sort(-1).values", "pass"),
    Bug("series: counts are shifted", NETWORK, "return torch.zeros_like(one), 1 +",
        "return targets[:, -1], 1 +"),
    Bug("series: one scale for all counts", OUTPUTS, "mean * scale + 1e-6", "mean + 1e-6"),
    Bug("series: dispersion upside down", OUTPUTS, "            1 / dispersion,",
        "            dispersion,"),
    Bug("series: negative counts pass", COUNTS, "(rows < 0) |", ""),
    Bug("series: channels mixed", NETWORK, "own.permute(1, 0, 3, 2, 4)",
        "own.permute(1, 3, 0, 2, 4)"),
    Bug("series: the first value for the last", NETWORK, "return targets[:, -1], one",
        "return targets[:, 0], one"),
    *(Bug(f"trainer: {name}", f"training/{file}", *texts) for name, file, *texts in TRAINER_BUGS),
)  # fmt: skip


def misplaced(bugs: tuple[Bug, ...] = BUGS) -> list[str]:
    """Returns a sentence per bug whose text its file does not have exactly once."""
    counts = [
        (bug, (REPOSITORY / "src/fastlstm" / bug.file).read_text(encoding="utf-8").count(bug.old))
        for bug in bugs
    ]
    return [
        f"{bug.name}: {count} places in {bug.file}, expected 1"
        for bug, count in counts
        if count != 1
    ]


class Copy:
    """A copy of the sources and tests with a build of its own."""

    def __init__(self, folder: Path, has_native_bugs: bool):
        self.root, self.build = folder / "tree", folder / "build"
        for name in ("src", "tests", "campaigns"):
            hidden = shutil.ignore_patterns("__pycache__", "*.so")
            shutil.copytree(REPOSITORY / name, self.root / name, ignore=hidden)
        for name in ("CMakeLists.txt", "pyproject.toml"):
            shutil.copy(REPOSITORY / name, self.root)
        site = folder / "site"
        site.mkdir()
        (site / "sitecustomize.py").write_text(SITE)
        path = os.pathsep.join([str(site), str(self.root / "src")])
        self.environment = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
        if not has_native_bugs:
            shutil.copy(native().__file__, self.root / "src/fastlstm")
            return
        import nanobind

        settings = {
            "nanobind_DIR": nanobind.cmake_dir(),
            "Python_EXECUTABLE": sys.executable,
            "CMAKE_BUILD_TYPE": "None",
            "CMAKE_CXX_FLAGS": "-O1 -DNDEBUG",
        }
        given = [f"-D{name}={value}" for name, value in settings.items()]
        checked(["cmake", "-S", str(self.root), "-B", str(self.build), *given])

    def compile(self) -> None:
        checked(["cmake", "--build", str(self.build), "--target", "_native"])
        (built,) = self.build.glob("_native*.so")
        target = self.root / "src/fastlstm" / built.name
        target.unlink(missing_ok=True)
        shutil.copy(built, target)

    def first_failure(self, tests: list[str]) -> str | None:
        """Runs tests up to the first failure; returns its name, None when all pass."""
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
        try:
            done = subprocess.run(
                command, cwd=self.root, env=self.environment, capture_output=True, text=True,
                timeout=TIMEOUT_S, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return "(the tests hang)"
        if done.returncode == 0:
            return None
        found = re.search(r"^(?:FAILED|ERROR) \S*/(\S+\.py::.*?)(?: - |$)", done.stdout, re.M)
        if found:
            return found[1]
        return f"(the tests crash: exit {done.returncode}) {done.stderr[-300:]}"

    def try_bug(self, bug: Bug) -> str | None:
        file = self.root / "src/fastlstm" / bug.file
        whole = file.read_text(encoding="utf-8")
        file.write_text(whole.replace(bug.old, bug.new), encoding="utf-8")
        try:
            if bug.is_native:
                self.compile()
            return self.first_failure(bug.tests)
        finally:
            file.write_text(whole, encoding="utf-8")


def checked(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="", help="bugs whose name contains this")
    parser.add_argument("--start", type=int, default=0, help="number of the first bug to plant")
    options = parser.parse_args()
    chosen = [bug for bug in BUGS[options.start :] if options.only in bug.name]
    if faults := misplaced():
        raise SystemExit("\n".join(faults))
    survivors = []
    with tempfile.TemporaryDirectory() as folder:
        has_native_bugs = any(bug.is_native for bug in chosen)
        copy = Copy(Path(folder), has_native_bugs)
        if has_native_bugs:
            copy.compile()
        for tests in {tuple(bug.tests): None for bug in chosen}:
            failure = copy.first_failure(list(tests))
            if failure is not None:
                raise SystemExit(f"without a bug the tests fail: {failure}")
        was_native = False
        for bug in chosen:
            if was_native and not bug.is_native:
                copy.compile()
            was_native = bug.is_native
            failure = copy.try_bug(bug)
            if failure is None:
                survivors.append(bug.name)
            print(f"{bug.name:36} {failure or 'SURVIVED'}", flush=True)
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} bugs caught")
    raise SystemExit(1 if survivors else 0)


if __name__ == "__main__":
    main()
