"""The report of a compression that never was."""

from fastlstm.compression.report import (
    Change,
    CompressReport,
    ModelFigures,
    OutputErrors,
    TrainingFigures,
)

SOURCE = ModelFigures(
    path="runs/book", sha256="a" * 64, weights="fp32", num_parameters=1_000_000,
    num_nonzero=1_000_000, file_bytes=4_000_000, resident_bytes=4_400_000,
    kernel="native decode, fp32", speed={1: 10_000.0, 64: 50_000.0}, quality=2.0,
)  # fmt: skip
RESULT = ModelFigures(
    path="runs/small", sha256="b" * 64, weights="int8", num_parameters=1_000_000,
    num_nonzero=250_000, file_bytes=1_000_000, resident_bytes=1_200_000,
    kernel="native decode, int8", speed={1: 30_000.0, 64: 200_000.0}, quality=2.01,
)  # fmt: skip
REPORT = CompressReport(
    kind="text", path="runs/small", methods=["75 % of the weights pruned", "int8"],
    source=SOURCE, result=RESULT, measure="bits_per_char",
    change=Change(difference=0.01, low=0.005, high=0.015, num_scored=5000, scored_on="book.txt"),
    not_measured=None,
    outputs=OutputErrors(what="logits", largest=0.5, rms=0.1, num_compared=4096, agreement=0.98),
    speed_unit="characters", lacks=["has no AVX-512 VNNI, with which int8 is fastest"],
    training=TrainingFigures(steps=100, seconds=65.0, teacher_s=12.0, reason="100 steps"),
    max_loss=None, is_published=True, notes=["a note"],
)  # fmt: skip
