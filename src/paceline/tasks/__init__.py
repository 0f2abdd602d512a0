"""What is learnt: a task turns a module and a batch into a loss sum and the weight it counts with."""
