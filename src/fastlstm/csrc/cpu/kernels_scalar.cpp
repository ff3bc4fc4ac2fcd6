#define FASTLSTM_ISA scalar
#define FASTLSTM_LANES 4

#include "cpu/every_table.h"
