"""fairseq-generate with matrix products in a CPU's units for bfloat16, as evaluate.sh --precision bf16 calls it."""

from fairseq_cli.generate import cli_main

from ea_tools.training.products import use_bf16_products

if __name__ == "__main__":
    use_bf16_products()
    cli_main()
