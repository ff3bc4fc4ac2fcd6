"""One model per group of a table: the groups, their jobs, and where the jobs run."""

import fastlstm.forecast.data  # noqa: F401 - names the extra where pyarrow is missing
