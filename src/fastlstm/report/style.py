"""The look of report.html: one style sheet, light and dark, no fonts or files from elsewhere."""

from __future__ import annotations

CSS = """
:root {
  --paper: #ffffff; --panel: #f6f7f9; --ink: #14171c; --muted: #667085; --grid: #e4e7ec;
  --a: #2563eb; --b: #9aa4b2; --good: #067647; --warn: #b54708;
  color-scheme: light dark;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #0f1115; --panel: #171a21; --ink: #e8eaed; --muted: #98a2b3; --grid: #2a2f3a;
    --a: #6ea8fe; --b: #667085; --good: #47cd89; --warn: #fdb022;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--paper); color: var(--ink);
  font: 15px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
  -webkit-text-size-adjust: 100%; overflow-wrap: anywhere;
}
main { max-width: 1080px; margin: 0 auto; padding: 48px 24px 72px; }
h1 { font-size: 30px; line-height: 1.2; letter-spacing: -.02em; margin: 0; }
h2 { font-size: 19px; letter-spacing: -.01em; margin: 56px 0 16px; }
h3 { font-size: 15px; margin: 0; }
.scroll + h3 { margin-top: 28px; }
.quiet + .scroll { margin-top: 8px; }
p { margin: 0; }
.lead { color: var(--muted); margin-top: 6px; }
.eyebrow { color: var(--a); font-weight: 600; font-size: 13px; margin-bottom: 8px; }
.state { display: inline-block; margin-top: 14px; font-size: 13px; font-weight: 600; }
.state.good { color: var(--good); } .state.warn { color: var(--warn); }
.numbers { display: grid; grid-template-columns: repeat(4, 1fr); gap: 12px; margin-top: 28px; }
.number { background: var(--panel); border-radius: 12px; padding: 18px 20px; }
.number .label { color: var(--muted); font-size: 13px; }
.number .value {
  font-size: 30px; line-height: 1.25; font-weight: 650; letter-spacing: -.02em;
  font-variant-numeric: tabular-nums; white-space: nowrap;
}
.number .unit { font-size: 15px; font-weight: 500; letter-spacing: 0; color: var(--muted); }
.number .note { color: var(--muted); font-size: 13px; }
.charts { display: grid; grid-template-columns: repeat(2, 1fr); gap: 32px 28px; }
figure { margin: 0; min-width: 0; }
figcaption p { color: var(--muted); font-size: 13px; }
svg { display: block; width: 100%; height: auto; margin-top: 8px; }
svg text { font-family: inherit; }
.scroll { overflow: auto; max-height: 460px; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums;
  overflow-wrap: normal; }
th, td { padding: 7px 7px; text-align: right; border-bottom: 1px solid var(--grid); }
th { color: var(--muted); font-weight: 500; font-size: 13px; position: sticky; top: 0;
  background: var(--paper); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; position: sticky; left: 0;
  background: var(--paper); min-width: min(10em, 36vw); overflow-wrap: anywhere; }
th:first-child { z-index: 1; }
tr.best td { font-weight: 600; background: var(--panel); position: sticky; top: 36px; bottom: 0; }
pre, code { font: 13px/1.6 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
pre {
  background: var(--panel); border-radius: 12px; padding: 16px 20px; margin: 0;
  white-space: pre-wrap; tab-size: 4;
}
.sample { margin-bottom: 20px; }
.sample h3 { color: var(--muted); font-weight: 500; font-size: 13px; margin-bottom: 6px; }
details summary { cursor: pointer; color: var(--a); margin: 4px 0 16px; }
dl { display: grid; grid-template-columns: repeat(3, 1fr); gap: 0 32px; margin: 0; }
dl div {
  display: flex; justify-content: space-between; gap: 16px; padding: 6px 0;
  border-bottom: 1px solid var(--grid); min-width: 0;
}
dt { color: var(--muted); white-space: nowrap; }
dd { margin: 0; text-align: right; }
ul { margin: 0; padding: 0; list-style: none; }
li { padding: 6px 0; border-bottom: 1px solid var(--grid); }
li.warn::before { content: "warning  "; color: var(--warn); font-weight: 600; }
.quiet { color: var(--muted); }
footer { margin-top: 64px; color: var(--muted); font-size: 13px; }
@media (max-width: 820px) {
  .numbers { grid-template-columns: repeat(2, minmax(0, 1fr)); }
  .number { padding: 14px 16px; }
  .number .value { font-size: 22px; }
  .charts, dl { grid-template-columns: 1fr; }
}
@media print { .scroll { max-height: none; } main { padding: 0; } }
"""
