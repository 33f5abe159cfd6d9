"""The training API in one process: methods over one base model and any number of models that train over it."""
