"""Tests with vLLM itself, in the environment that TANDEM_TEST_VLLM_PYTHON names."""
