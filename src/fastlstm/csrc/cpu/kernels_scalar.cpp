#define FASTLSTM_ISA scalar
#define FASTLSTM_LANES 4
#define FASTLSTM_PORTABLE

#include "cpu/every_table.h"
