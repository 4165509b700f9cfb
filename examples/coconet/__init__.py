"""CoCoNeT's programs: optimisers, Megatron's blocks, and GPT's pipeline, in a dozen lines each."""
