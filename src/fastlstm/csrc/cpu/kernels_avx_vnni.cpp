#define FASTLSTM_ISA avx_vnni
#define FASTLSTM_LANES 8
#define FASTLSTM_ONLY_DECODES_INTEGERS

#include "cpu/every_table.h"
