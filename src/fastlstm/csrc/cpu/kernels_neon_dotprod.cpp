#define FASTLSTM_ISA neon_dotprod
#define FASTLSTM_LANES 4
#define FASTLSTM_ONLY_DECODES_INTEGERS

#include "cpu/every_table.h"
