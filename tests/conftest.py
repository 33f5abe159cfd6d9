from hypothesis import Phase, settings

# make mutate: a mutant needs one example that fails, not the smallest one
settings.register_profile("mutation", phases=[Phase.explicit, Phase.generate], database=None)
