#define FASTLSTM_ISA avx512_vnni
#define FASTLSTM_LANES 16
#define FASTLSTM_ONLY_DECODES_INTEGERS

#include "cpu/every_table.h"
