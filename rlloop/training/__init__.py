"""The training API: verbs over one base model and many models that train above it, in this process."""
