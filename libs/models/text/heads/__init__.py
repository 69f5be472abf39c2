"""What turns an encoder's hidden states into numbers about a text. All heads compute in float32."""
