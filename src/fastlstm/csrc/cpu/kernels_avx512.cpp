#define FASTLSTM_ISA avx512
#define FASTLSTM_LANES 16

#include "cpu/every_table.h"
