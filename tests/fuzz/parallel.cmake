# Weight files: from nothing, and from a header that is right.
dskv_fuzz_target(checkpoint dskv_parallel)
set(seeds ${CMAKE_CURRENT_BINARY_DIR}/seeds/checkpoint)
file(WRITE ${seeds}/header [=[{"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},"b":{"dtype":"BF16","shape":[4],"data_offsets":[24,32]},"__metadata__":{"format":"pt"}}01234567890123456789012345678901]=])
add_test(NAME fuzz.checkpoint_header COMMAND fuzz_checkpoint -runs=100000 -max_len=600 -seed=1 ${seeds})
set_tests_properties(fuzz.checkpoint_header PROPERTIES LABELS fuzz TIMEOUT 120)
