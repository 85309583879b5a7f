"""What torch's NCCL is told through the environment, by `launch` and by files that start jobs alike."""

# A collective that fails or times out ends the process (3: without waiting for its communicators), the last launches
# are kept, and written to files (TORCH_NCCL_DEBUG_INFO_TEMP_FILE and the rank) when one times out.
NCCL = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
    "TORCH_FR_BUFFER_SIZE": "2000",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
}
