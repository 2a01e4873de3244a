"""The package that ``SGLANG_EXTERNAL_MM_PROCESSOR_PACKAGE`` names; SGLang imports its modules."""
