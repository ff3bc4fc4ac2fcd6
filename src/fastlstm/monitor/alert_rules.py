"""The rules of alerts by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastlstm.monitor.loss_rules import LossSpike, NotFinite, Overfitting
from fastlstm.monitor.process_rules import Dead, Hang
from fastlstm.monitor.resource_rules import DiskFull, MemoryGrowth
from fastlstm.monitor.speed_rules import CoreWait, EtaSlip, InputStall, Slowdown

if TYPE_CHECKING:
    from fastlstm.monitor.alert_rule import Rule

RULES: dict[str, type[Rule]] = {
    rule.name: rule
    for rule in (
        NotFinite, LossSpike, InputStall, EtaSlip, Slowdown, CoreWait,
        MemoryGrowth, DiskFull, Overfitting, Dead, Hang,
    )
}  # fmt: skip
