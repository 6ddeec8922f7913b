// The rank side of the communication model that a kernel is compiled for: the four functions, and for_each_record.
#pragma once

#include "inc_all_to_all.cuh"
