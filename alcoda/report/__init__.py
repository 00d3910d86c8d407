"""One self-contained HTML page about one run or several: reads the files of run folders, imports no torch.

`read` reads a run folder, `figures` draws, `sections` words, `page` puts it together and writes the file.
"""
