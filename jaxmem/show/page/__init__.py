"""The report as one HTML file: charts and tables that work offline, and tables without scripts."""

from jaxmem.show.page.document import document as document
from jaxmem.show.page.writing import write_page as write_page
