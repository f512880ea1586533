"""The engine on a server that speaks OpenAI's completions protocol with token ids."""
