"""The axes of the recurrence, one file each. None of them knows another, owns a loop, or touches logits."""
