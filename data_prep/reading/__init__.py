"""Read every document once, into the spool: a folder of plain files with texts, their descriptions and signatures."""
