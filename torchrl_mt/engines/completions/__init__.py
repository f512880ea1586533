"""Engine for servers of OpenAI's completions protocol with token ids."""
