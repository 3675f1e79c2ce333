"""Parts of the study of photographs."""
