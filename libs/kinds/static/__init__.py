"""Static embedders (Model2Vec, StaticEmbedding): the mean of fixed vectors of tokens."""
