"""Connectors that know no engine: what vLLM, SGLang and LMDeploy plugins wrap."""
