#define FASTLSTM_ISA neon_bf16
#define FASTLSTM_LANES 4
#define FASTLSTM_WITHOUT_FP32

#include "cpu/every_table.h"
