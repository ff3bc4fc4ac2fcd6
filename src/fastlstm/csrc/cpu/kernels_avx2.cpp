#define FASTLSTM_ISA avx2
#define FASTLSTM_LANES 8

#include "cpu/every_table.h"
