# The engine: start, what ranks share, plans, and their passes over the device.
set(DSKV_PARALLEL_ENGINE comm.c comm_self.c comm_shm.c comm_staged.c command.c engine.c measure_sums.c execute.c flag.c forward.c
    merge.c numerics.c passes.c plan.c plan_check.c plan_file.c pool.c recorded.c segment.c select.c start.c steps.c stream.c)
