"""Models for Hugging Face's transformers, and from them: alma-export and alma-import.

`configuration_alma.py` and `modeling_alma.py` are copied into exported folders. So they import torch and transformers
only, and nothing else of this package.
"""
