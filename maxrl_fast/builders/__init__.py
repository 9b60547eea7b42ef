"""From a resolved configuration to the objects of a run. They take what they need, and do not know the configuration."""
