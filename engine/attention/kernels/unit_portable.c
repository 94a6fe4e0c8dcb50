/* The kernels for portable; the build compiles this file with that instruction set's flags. */
#define UNIT qe_unit_portable
#define UNIT_NAME "portable"
#include "unit.h"
